"""How much memory the KV cache takes: pagedmlx beside mlx-lm and the classic reservations.

    python scripts/compare_memory.py --json report.json --charts folder   # pip install '.[bench]'
    python scripts/compare_memory.py --model none --json -                # no model
    python scripts/compare_memory.py --requests-file mine.jsonl --real own --json report.json

First whole traces go through the real core (scheduler and block tables, no model) and through the
schemes that the PagedAttention paper (Kwon et al., 2023) compares with, all in the same memory.
Then the same model serves the same requests with pagedmlx and with mlx-lm's BatchGenerator, each in
a process of its own: fewer requests, not shorter ones. Rows of a requests file are as
``scripts/compare/traces.py`` says in ``read_jobs``. Tables and progress go to stderr.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.live import Live

from scripts.compare import processes, simulate, tables
from scripts.compare.processes import RealRunError
from scripts.compare.traces import (
    VOCABULARY,
    WORKLOADS,
    Maker,
    Trace,
    check_budget,
    own_trace,
    read_jobs,
)
from scripts.report import add_json_option, save, writable, write

TINY = "tiny:"
OWN = "own"
PAPER_TOKEN_BYTES = 819_200
"""A token of OPT-13B in float16, the paper's model; taken when no model is."""


def main() -> int:
    """Run the script."""
    options = parse()
    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 120  # a file has room for whole tables
    try:
        with tempfile.TemporaryDirectory() as folder:
            report = run(options, console, Path(folder))
    except (ValueError, OSError, RealRunError) as error:
        console.print(f"error: {error}", markup=False, style="red")
        return 1
    if options.json:
        save(report, options.json)
    if options.markdown:
        write(tables.markdown(report), options.markdown)
    if options.charts:
        from scripts.compare.draw import draw

        for path in draw(report, options.charts):
            console.print(f"wrote {path}", markup=False, highlight=False)
    for problem in (problems := unequal(report)):
        console.print(problem, markup=False, style="red")
    return 1 if problems else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    known = ",".join(WORKLOADS)
    add = parser.add_argument
    add("--model", default="smollm2", help="name, folder, GGUF file, tiny:TYPE, or none")
    add_json_option(parser, required=False)
    add("--markdown", type=writable, metavar="FILE", help="the tables; - is stdout")
    add("--charts", type=Path, metavar="FOLDER", help="PNG pictures")
    add("--workloads", default=known, help=f"of the traces, default all: {known}")
    add(
        "--requests",
        type=int,
        metavar="N",
        help="requests of each trace, in place of its own number",
    )
    add("--real", default="chat,uneven", help="workloads that the model serves; none for none")
    add("--real-requests", type=int, default=4, metavar="N", help="requests of each, default 4")
    add("--requests-file", type=Path, metavar="JSONL", help=f"own requests, workload {OWN}")
    add("--kv-memory", metavar="SIZE", help="memory for K and V in the traces, such as 2GiB")
    add("--rate", type=float, metavar="X", help="Poisson arrivals a second; 0 is all at once")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    for field in ("workloads", "real"):
        names = [name for name in getattr(options, field).split(",") if name not in ("", "none")]
        if wrong := set(names) - {*WORKLOADS, *((OWN,) if options.requests_file else ())}:
            parser.error(f"--{field}: no workload {', '.join(sorted(wrong))}; there are {known}")
        setattr(options, field, names)
    if options.charts and find_spec("matplotlib") is None:
        parser.error("--charts: needs matplotlib: pip install '.[bench]'")
    if options.charts and options.charts.exists() and not options.charts.is_dir():
        parser.error(f"--charts: {options.charts} is not a folder")
    if options.requests_file and OWN not in options.workloads:
        options.workloads.append(OWN)
    counts = (options.real_requests, 1 if options.requests is None else options.requests)
    if min(counts) < 1 or (options.rate or 0) < 0:
        parser.error("numbers of requests must be at least 1 and --rate at least 0")
    try:
        options.kv_memory = parse_size(options.kv_memory) if options.kv_memory else None
    except ValueError as error:
        parser.error(f"--kv-memory: {error}")
    return options


def parse_size(text: str) -> int:
    """Bytes from a number with KiB, MiB, GiB or nothing behind it."""
    found = re.fullmatch(r"([\d.]+) *(Ki?B?|Mi?B?|Gi?B?)?", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is no size such as 2GiB")
    power = " kmg".index((found[2] or " ")[0].lower())
    return int(float(found[1]) * 1024**power)


def run(options: argparse.Namespace, console: Console, folder: Path) -> dict[str, Any]:
    """All that was asked for, as a report."""
    name: str = options.model
    info: dict[str, Any] = {"token_bytes": PAPER_TOKEN_BYTES, "vocab_size": VOCABULARY}
    path = save_tiny(folder, name.removeprefix(TINY)) if name.startswith(TINY) else name
    texts = prompt_texts(options.requests_file) if options.requests_file else []
    if name != "none":
        console.print(f"looking at {name}", markup=False)
        info = processes.inspect(path, texts)
    elif texts:
        raise ValueError("prompts as text need a model")
    token_bytes: int = info["token_bytes"]
    maker = Maker(
        seed=options.seed,
        vocab_size=info["vocab_size"],
        rate=options.rate,
        count=options.requests,
        budget_slots=options.kv_memory // token_bytes if options.kv_memory else None,
    )
    own = None
    if options.requests_file:
        known: dict[str, list[int]] = dict(zip(texts, info.get("texts", []), strict=True))
        jobs = read_jobs(options.requests_file, known.__getitem__, info["vocab_size"], options.seed)
        own = own_trace(jobs, maker.budget_slots)

    def make(workload: str, maker: Maker = maker) -> Trace:
        if workload == OWN:
            assert own is not None
            return own
        return maker.make(workload)

    report: dict[str, Any] = {
        "model": name,
        "token_bytes": token_bytes,
        "notes": info.get("notes", []),
        "seed": options.seed,
        "clock": {"step_s": simulate.STEP_S, "token_s": simulate.TOKEN_S},
        **{part: {} for part in ("workloads", "fanout", "real")},
        "block_sizes": [],
    }
    board = tables.Board(token_bytes, console)
    with Live(board, console=console, refresh_per_second=4, vertical_overflow="visible"):
        simulate_all(report, [make(workload) for workload in options.workloads], maker, board)
        if name != "none":
            few = replace(maker, count=options.real_requests, rate=options.rate or 0)
            serve_all(report, path, info, [make(each, few) for each in options.real], board)
    return report


def simulate_all(
    report: dict[str, Any], traces: list[Trace], maker: Maker, board: tables.Board
) -> None:
    """The pure part."""
    for trace in traces:
        check_budget(trace)
    # Points over time are many, and one picture of them tells it all.
    names = [trace.name for trace in traces]
    drawn = "chat" if "chat" in names else next(iter(names), None)
    for trace in traces:
        schemes: dict[str, Any] = {}
        rows = simulate.compare(trace)
        for scheme, row in board.track(rows, len(simulate.SCHEMES), f"trace {trace.name}"):
            if trace.name != drawn:
                del row["series"]
            schemes[scheme] = row
            board.add_scheme(trace.name, scheme, row)
        report["workloads"][trace.name] = {
            "what": trace.what,
            "num_requests": len(trace.jobs),
            "max_len": trace.max_len,
            "budget_slots": trace.budget_slots,
            "schemes": schemes,
        }
        if trace.name == "chat":
            sizes = simulate.BLOCK_SIZES
            rows = board.progress.track(
                simulate.sweep(trace), len(sizes), description="block sizes"
            )
            report["block_sizes"] = list(rows)
        if trace.name == "fanout":
            counts = simulate.CONCURRENCIES
            pairs = simulate.by_concurrency(lambda count: maker.fanout(count), counts)
            found = board.track(pairs, len(counts), "agents at a time")
            report["fanout"] = {str(count): rows for count, rows in found}


def serve_all(
    report: dict[str, Any],
    model: str,
    info: dict[str, Any],
    traces: list[Trace],
    board: tables.Board,
) -> None:
    """The part with a model."""
    for trace in traces:
        longest = max(len(job.prompt) + job.num_outputs for job in trace.jobs)
        if longest > info["max_model_len"]:
            raise ValueError(
                f"workload {trace.name} needs {longest} tokens of context, the model has "
                f"{info['max_model_len']}; leave it out of --real"
            )
    for trace in traces:

        def start(system: str, trace: Trace = trace) -> processes.Tell:
            what = f"{trace.name}: {system}"
            board.note(what)
            bar = board.progress.add_task(what, total=None)

            def tell(line: dict[str, Any]) -> None:
                board.show_running(trace.name, system, line)
                board.progress.update(bar, completed=line["done"], total=line["of"])

            return tell

        rows = processes.compare(trace, model, info["depth"], start)
        board.add_real(trace.name, rows)
        for task in board.progress.task_ids:
            board.progress.remove_task(task)
        report["real"][trace.name] = {"what": trace.what, "systems": rows}


def unequal(report: dict[str, Any]) -> list[str]:
    """Real runs whose counts are not the core's."""
    return [
        f"{name}: the engine counted {ours['counts']}, the core {ours['core']}"
        for name, each in report["real"].items()
        if (ours := each["systems"]["pagedmlx"])["counts_equal_core"] is False
    ]


def prompt_texts(path: Path) -> list[str]:
    """Prompts of a requests file that are text; what is wrong with a row is told later."""
    texts: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("prompt"), str):
            texts.append(row["prompt"])
    return list(dict.fromkeys(texts))


def save_tiny(folder: Path, kind: str) -> str:
    """Write a folder with a tiny random model, in a process of its own: it needs MLX."""
    code = (
        "import sys; from pathlib import Path; from tests.support.tiny_models import "
        "save_tiny_folder; save_tiny_folder(Path(sys.argv[1]), sys.argv[2])"
    )
    path = folder / kind
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code, path, kind], cwd=root, capture_output=True, text=True
    )
    if done.returncode:
        raise ValueError(f"tiny:{kind}: {done.stderr.strip().splitlines()[-1]}")
    return str(path)


if __name__ == "__main__":
    raise SystemExit(main())
