"""Runs a tiny random model of every model type of mlx-lm, and writes docs/models.md from it.

    python scripts/survey_models.py --json FILE [--only TYPE,TYPE...]

Each type runs in a process of its own, in float32 on the CPU: logits of mixed steps over scattered
blocks, and greedy tokens of the engine with chunked prompts, preemption, prefix hits and forks, all
against mlx-lm's own. Windows are shorter than the prompts. The exit code is 1 if a model that the
engine takes gives other tokens, or fewer types are served than promised.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pagedmlx.models.blas import load_fast_blas

load_fast_blas()  # counts only before MLX is imported

import mlx.core as mx
import numpy as np

from pagedmlx.errors import PagedMLXError, first_line
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.loader import LoadedModel
from pagedmlx.models.parts import RowLayout
from pagedmlx.models.probe import probe_model
from pagedmlx.ops import make_backend
from scripts.report import add_json_option, save
from tests.support.greedy import expected_tokens, make_prompts, run_every_way
from tests.support.model_zoo import VOCAB_SIZE, model_types, zoo_config
from tests.support.paged_run import PagedRun
from tests.support.tiny_models import tiny_model

TIMEOUT_S = 120
NUM_TRIES = 5
MIN_NATIVE = 58
MIN_SERVED = 80
MAX_ERROR = 1e-4
VERDICTS = ("native", "gathered", "hybrid", "refused", "wrong")
DOCUMENT = ROOT / "docs" / "models.md"


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one model type; ``wrong`` is a fault of ours."""

    model_type: str
    verdict: str
    rows: str = ""
    reason: str = ""
    error: float = 0.0
    num_preemptions: int = 0
    num_cached_tokens: int = 0


def survey(model_type: str) -> Row:
    """Run one type in this process, which is done with MLX afterwards."""
    try:
        zoo_config(model_type)
    except ImportError as error:
        return Row(model_type, "refused", reason=f"can't be imported here: {error}")
    loaded = tiny_model(model_type)
    try:
        row = logits(loaded)
    except PagedMLXError as error:
        return Row(model_type, "refused", reason=str(error).removeprefix(f"{model_type}: "))
    runs = run_every_way(loaded, VOCAB_SIZE, depth=1)
    faults = [f"{name}: other tokens" for name, equal in runs.equal.items() if not equal]
    if row.error > MAX_ERROR:
        faults.append(f"logits differ by {row.error:.1g}")
    if not runs.num_preemptions:
        faults.append("nothing was preempted")
    if (runs.num_cached_tokens > 0) == (row.verdict == "hybrid"):
        faults.append(f"{runs.num_cached_tokens} tokens from the prefix cache")
    return Row(
        model_type,
        "wrong" if faults else row.verdict,
        row.rows,
        "; ".join(faults) or row.reason,
        row.error,
        runs.num_preemptions,
        runs.num_cached_tokens,
    )


def logits(loaded: LoadedModel) -> Row:
    """Find the layout that suits a model and compare the logits of mixed steps in it."""
    layouts = list(RowLayout)
    while True:
        with ModelAdapter(loaded, make_backend("auto"), block_size=4, layouts=layouts) as adapter:
            layouts = layouts[layouts.index(adapter.row_layout) + 1 :]
            try:
                probe_model(adapter)
            except PagedMLXError:
                if not layouts:
                    raise
                continue
            verdict = "gathered" if adapter.reads_gathers else "native"
            reason = "reads K and V itself" if adapter.reads_gathers else ""
            if adapter.layout.state_bytes:
                verdict, reason = "hybrid", " and ".join(filter(None, ["keeps a state", reason]))
            return Row(
                loaded.model_type, verdict, str(adapter.row_layout), reason, mixed_error(adapter)
            )


def mixed_error(adapter: ModelAdapter) -> float:
    """Largest difference between logits of mixed steps, as a share of the largest logit."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in (23, 40, 31)]
    run = PagedRun(adapter, len(texts), max_tokens=44)
    done = [0] * len(texts)
    found: list[tuple[int, int, np.ndarray[Any, Any]]] = []
    for counts in ((20, 17, 0), (1, 18, 7), (1, 1, 22), (1, 1, 1)):
        steps = sorted((count, at) for at, count in enumerate(counts) if count)
        parts = [(at, texts[at][done[at] : done[at] + count]) for count, at in steps]
        for (count, at), row in zip(steps, run.step(parts), strict=True):
            done[at] += count
            found.append((at, done[at], row))
    worst = 0.0
    for at, length, row in found:
        expected = np.array(adapter.last_logits(mx.array(texts[at][:length]), caches(adapter)))
        worst = max(worst, float(np.abs(row - expected).max() / np.abs(expected).max()))
    return worst


def caches(adapter: ModelAdapter) -> list[Any]:
    """Fresh caches of mlx-lm's own."""
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(adapter.loaded.model)


def survey_apart(model_type: str) -> Row:
    """Run one type in a process of its own: a crash or a hang is one row."""
    complaint = ""
    for _ in range(2):  # files may be changing beneath it
        try:
            done = run_apart("--one", model_type)
        except subprocess.TimeoutExpired:
            return Row(model_type, "wrong", reason=f"no answer within {TIMEOUT_S} s")
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if lines:
            return Row(**json.loads(lines[-1]))
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        complaint = f"exit code {done.returncode}: {last}"
    if any(run_apart("--alone", model_type).returncode for _ in range(NUM_TRIES)):
        return Row(model_type, "refused", reason="the process crashes with mlx-lm alone too")
    return Row(model_type, "wrong", reason=complaint)


def run_apart(option: str, model_type: str) -> subprocess.CompletedProcess[str]:
    """Run this script for one type."""
    command = [sys.executable, __file__, option, model_type]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def run_alone(model_type: str) -> None:
    """Run a type by mlx-lm, with nothing of ours."""
    model = tiny_model(model_type).model
    for prompt in make_prompts(VOCAB_SIZE):
        expected_tokens(model, prompt)


def write_document(rows: list[Row], version: str) -> None:
    """Write docs/models.md."""
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}
    lines = [
        "# Models",
        "",
        "Written by `scripts/survey_models.py`; don't edit.",
        "",
        f"mlx-lm {version} has {len(rows)} model types. A tiny random model of each ran through "
        "the engine in float32 on the CPU: steps that mix prompts and decoding over scattered "
        "blocks, prompts in chunks, prefix hits, preemption, forks. Its logits and greedy tokens "
        "were compared with mlx-lm's own. Windows were shorter than the prompts. It says that a "
        "type's arithmetic is right, not how well a model answers.",
        "",
        f"* **native** ({counts['native']}): all attention is on the blocks.",
        f"* **gathered** ({counts['gathered']}): the model has attention maths of its own in some "
        "layer, so K and V are gathered from the blocks for it. Memory is paged as ever; a step "
        "costs more time.",
        f"* **hybrid** ({counts['hybrid']}): some layers keep a recurrent state, one for each "
        "sequence that runs. It is dropped on preemption and computed again. Prefix reuse is off.",
        f"* **refused** ({counts['refused']}): refused when it is loaded, by name and with this "
        "reason.",
        "",
        "Rows say how tokens go through the model. *token rows*: all of a step in one call. "
        "*sequence rows*: one call for all that decode, one for each chunk of a prompt. *single "
        "rows*: one call for each sequence, as the model's code is right for one alone.",
        "",
        "| Model type | Verdict | Rows | Reason |",
        "|---|---|---|---|",
        *(f"| {row.model_type} | {row.verdict} | {row.rows} | {row.reason} |" for row in rows),
        "",
    ]
    DOCUMENT.write_text("\n".join(lines), encoding="utf-8")


def note(line: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_json_option(parser, default="-")
    parser.add_argument("--only", metavar="TYPES", help="these only; docs/models.md stays")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--one", metavar="TYPE", help=argparse.SUPPRESS)
    parser.add_argument("--alone", metavar="TYPE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        run_alone(options.alone)
        return 0
    if options.one:
        mx.set_default_device(mx.Device(mx.cpu))
        try:
            row = survey(options.one)
        except Exception as error:  # of the model's own code; nothing of it must get lost
            row = Row(
                options.one, "refused", reason=f"mlx-lm can't run it here: {first_line(error)}"
            )
        sys.stdout.write(json.dumps(asdict(row)) + "\n")
        sys.stdout.flush()
        return 0

    types = options.only.split(",") if options.only else model_types()
    rows: list[Row] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(survey_apart, types):
            rows.append(row)
            note(f"{row.model_type}: {row.verdict} {row.rows} {row.reason}")
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}
    report = {"counts": counts, "types": [asdict(row) for row in rows]}
    save(report, options.json)
    note(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if options.only:
        return 1 if counts["wrong"] else 0
    from importlib.metadata import version

    write_document(rows, version("mlx-lm"))
    served = counts["native"] + counts["gathered"] + counts["hybrid"]
    good = counts["native"] >= MIN_NATIVE and served >= MIN_SERVED and not counts["wrong"]
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
