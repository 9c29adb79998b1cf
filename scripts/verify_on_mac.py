"""All that a Mac can tell about the kernels and the engine, in one report to attach to an issue.

    python scripts/verify_on_mac.py --json report.json     # "-" prints the report

Meant for a Mac, where MLX computes with Metal; what needs no GPU runs anywhere. Each part is a
process of its own, so that one which fails, hangs or is killed takes no other along. The exit code
is 1 when a part fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.report import add_json_option, save

NEEDS_GPU = "needs a GPU"
SURROUNDINGS = ("time", "machine", "versions", "folders")
# Errors of Metal's compiler are long; what matters of a crash comes last.
MAX_ERROR_CHARS = 4000

# Every kernel is committed by itself, which orders them otherwise than long buffers do.
ONE_BY_ONE = {"MLX_MAX_OPS_PER_BUFFER": "1"}
AGAIN = " one by one"


@dataclass(frozen=True)
class Part:
    """A command of Python that writes one JSON document to stdout, and exits with 0 if all is well.

    Attributes:
        name: By which ``--only`` takes it.
        command: Arguments of Python.
        on_gpu: Whether it needs a GPU.
        minutes: After which it has failed.
        environment: Variables added to this process's.
    """

    name: str
    command: tuple[str, ...]
    on_gpu: bool = True
    minutes: float = 10
    environment: tuple[tuple[str, str], ...] = ()


DEVICE = Part(
    "device",
    ("scripts/check_engine.py", "--only", "device", "--json", "-"),
    on_gpu=False,
    minutes=3,
)


def parts(model: str) -> list[Part]:
    """What there is to find out, the most important first."""
    engine = ("scripts/check_engine.py", "--model", model, "--only")
    kernels = ("scripts/check_kernels.py", "--only")
    bench = ("scripts/bench_kernels.py", "--only")
    whole = ("scripts/bench_model.py", "--model", model, "--only")
    stdout = ("--json", "-")
    checks = [
        Part("operations", (*engine, "attention,pool,sampler", *stdout), on_gpu=False),
        Part("token", (*kernels, "token", *stdout), minutes=5),
        Part(
            "kernels",
            (*kernels, "variants,prefill,cascade,copies,rope,sampling,ragged,long", *stdout),
            minutes=20,
        ),
        Part("parity", (*engine, "parity", *stdout), on_gpu=False),
        Part("logits", (*whole, "logits,cascade", *stdout)),
    ]
    return [
        Part("doctor", ("-m", "pagedmlx", "doctor", "--kernels", "--json"), on_gpu=False),
        *checks,
        Part("speed of decode", (*bench, "ceiling,decode,factors,write_attend", *stdout)),
        Part("speed of prefill", (*bench, "prefill,write,rope", *stdout)),
        Part("speed of cascades", (*bench, "cascade", *stdout)),
        Part("speed of others", (*bench, "sampling,sdpa,batch_cache", *stdout)),
        Part("peak memory", ("scripts/bench_kernels.py", "--peak", *stdout)),
        Part("speed of a model", (*whole, "stream", "--contexts", "128,1024,4096", *stdout)),
        *(
            replace(
                check, name=check.name + AGAIN, on_gpu=True, environment=tuple(ONE_BY_ONE.items())
            )
            for check in checks
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_json_option(parser, default="-")
    parser.add_argument("--model", default="smollm2", help="model to generate with")
    parser.add_argument("--only", default="", help="parts by name, with commas between")
    parser.add_argument("--minutes", type=float, default=45, help="most minutes that all may take")
    options = parser.parse_args()
    chosen = parts(options.model)
    if options.only:
        names = [part.name for part in chosen]
        wanted = options.only.split(",")
        if unknown := [name for name in wanted if name not in names]:
            parser.error(f"--only: no part {', '.join(unknown)}; there are {', '.join(names)}")
        chosen = [part for part in chosen if part.name in wanted]
    report = verify(chosen, options.minutes)
    save(report, options.json)
    return 0 if report["ok"] else 1


def verify(chosen: Sequence[Part], minutes: float) -> dict[str, Any]:
    """Run the parts one after the other.

    Args:
        chosen: The parts.
        minutes: Most that all of them may take; a part that finds none left has failed.

    Returns:
        The report.
    """
    deadline = time.monotonic() + 60 * minutes
    device = run(DEVICE, deadline)
    found = device.get("result", {}).get("device", {})
    results = [device, *_run_all(chosen, deadline, has_gpu=bool(found.get("gpu")))]
    failed = [result["name"] for result in results if result["ok"] is False]
    skipped = [result["name"] for result in results if result["ok"] is None]
    return {
        "ok": not failed,
        "failed": failed,
        "skipped": skipped,
        "revision": _revision(),
        "mlx": found,
        "parts": results,
    }


def _run_all(chosen: Sequence[Part], deadline: float, *, has_gpu: bool) -> Iterator[dict[str, Any]]:
    for part in chosen:
        if part.on_gpu and not has_gpu:
            _tell(f"--   {part.name}: {NEEDS_GPU}")
            yield {"name": part.name, "ok": None, "skipped": NEEDS_GPU}
        else:
            yield run(part, deadline)


def run(part: Part, deadline: float) -> dict[str, Any]:
    """Run a part in a process of its own; whatever becomes of it is part of the report.

    Args:
        part: The part.
        deadline: By ``time.monotonic``; it gets no longer than until then.
    """
    start = time.monotonic()
    seconds = min(60 * part.minutes, deadline - start)
    if seconds <= 0:
        outcome: dict[str, Any] = {"ok": False, "error": "no time was left for it"}
    else:
        _tell(f"...  {part.name}")
        outcome = _outcome(part, seconds)
    took = round(time.monotonic() - start, 1)
    last_line = outcome.get("stderr", "").rpartition("\n")[2]
    reason = "" if outcome["ok"] else f": {outcome['error']}; {last_line}"
    _tell(f"{'ok  ' if outcome['ok'] else 'FAIL'} {part.name} ({took:.0f} s){reason}")
    return {"name": part.name, "seconds": took, **outcome}


def _outcome(part: Part, seconds: float) -> dict[str, Any]:
    # In a session of its own, so that the processes which it starts end with it.
    process = subprocess.Popen(
        [sys.executable, *part.command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=ROOT,
        env=os.environ | dict(part.environment),
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
        problem = f"exit code {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        _kill(process)
        output, errors = process.communicate()
        problem = f"not done after {seconds:.0f} s"
    except BaseException:
        _kill(process)
        raise
    # The report is for others to read: it need not say who ran it.
    output, errors = (text.replace(f"{Path.home()}/", "~/") for text in (output, errors))
    outcome: dict[str, Any] = {"ok": not problem}
    try:
        result = json.loads(output)
    except ValueError:
        problem = problem or "wrote no JSON"
        outcome["ok"] = False
    else:
        # The report has these once for all parts.
        outcome["result"] = {name: result[name] for name in result if name not in SURROUNDINGS}
    if not outcome["ok"]:
        outcome |= {"error": problem, "stderr": errors.strip()[-MAX_ERROR_CHARS:]}
    return outcome


def _kill(process: subprocess.Popen[str]) -> None:
    # With all that it started; the group may have ended just now.
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _revision() -> str | None:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT
        )
    except OSError:
        return None
    return found.stdout.strip() or None


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
