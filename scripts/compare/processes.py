"""Starts ``scripts/compare/real.py`` once per system and checks its counts against the core's."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scripts.compare.simulate import core_counts, run
from scripts.compare.systems import LIMITS, Paged
from scripts.compare.traces import Job, Trace

SCRIPT = Path(__file__).with_name("real.py")
SYSTEMS = ("pagedmlx", "mlx-lm")
MAX_NUM_SEQS = 64

TIMELESS = (
    *("num_prompt_tokens", "num_cached_tokens", "num_computed_tokens", "num_output_tokens"),
    "num_preemptions",
)
PEAK_TOLERANCE = 0.05

Tell = Callable[[dict[str, Any]], None]
"""Told how far a run is."""


class RealRunError(Exception):
    """A system's process ended without a result; the message is the end of what it wrote."""


class Running:
    """A process with a system; one result, or one for each round that it is asked for.

    Args:
        job: What ``scripts/compare/real.py`` takes.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path, self._errors = (Path(self._folder.name) / name for name in ("job.json", "errors"))
        path.write_text(json.dumps(job), encoding="utf-8")
        with self._errors.open("w", encoding="utf-8") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, SCRIPT, path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        with suppress(BrokenPipeError):  # what it was asked last and has not read
            self._process.communicate()
        self._folder.cleanup()

    def ask(self, jobs: Sequence[Job] | None = None) -> None:
        """Have it begin with another round.

        Args:
            jobs: The requests from now on; those of the round before if None.
        """
        assert self._process.stdin is not None
        line = "" if jobs is None else json.dumps([asdict(job) for job in jobs])
        # Without somebody who reads there will be no result either, which says why.
        with suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def wait_until_loaded(self) -> None:
        """Wait until it can begin with the first round.

        Raises:
            RealRunError: The process ended before.
        """
        self._next("loaded")

    def result(self, tell: Tell = lambda _: None) -> dict[str, Any]:
        """Wait for the next result.

        Raises:
            RealRunError: The process ended without one.
        """
        return self._next("result", tell)

    def _next(self, kind: str, tell: Tell = lambda _: None) -> dict[str, Any]:
        """Wait for the next line of a kind."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"kind": "progress"'):
                tell(json.loads(line))
            elif line.startswith(f'{{"kind": "{kind}"'):
                found: dict[str, Any] = json.loads(line)
                del found["kind"]
                return found
        code = self._process.wait()
        said = self._errors.read_text(encoding="utf-8").strip().splitlines()
        raise RealRunError(said[-1] if said else f"exit code {code}")


def start(job: dict[str, Any], tell: Tell = lambda _: None) -> dict[str, Any]:
    """Run one job in a process of its own.

    Raises:
        RealRunError: It gave no result.
    """
    with Running(job) as running:
        return running.result(tell)


def inspect(model: str, texts: Sequence[str] = ()) -> dict[str, Any]:
    """Bytes of a token, vocabulary, context, and texts as tokens of a model."""
    return start({"system": "inspect", "model": model, "texts": list(texts)})


def compare(
    trace: Trace, model: str, depth: int, on_start: Callable[[str], Tell]
) -> dict[str, dict[str, Any]]:
    """The same requests through both systems, each in a process of its own.

    The pool is as large as the core says that the trace needs when nobody has to wait; the core's
    counts with that pool are what the engine must reach too.

    Args:
        trace: What to run.
        model: Name or path.
        depth: Steps that the engine schedules ahead on this machine.
        on_start: Told which system starts; gives who is told how far it is.
    """
    num_blocks = pool_blocks(trace, depth)
    expected = expect(trace, num_blocks, depth)
    jobs = [asdict(job) for job in trace.jobs]
    settings = {
        "num_blocks": num_blocks,
        "max_num_seqs": MAX_NUM_SEQS,
        "prefill_chunk_size": LIMITS.max_chunk,
    }
    common = {"model": model, "jobs": jobs, "settings": settings, "max_num_seqs": MAX_NUM_SEQS}
    rows: dict[str, dict[str, Any]] = {}
    for system in SYSTEMS:
        tell = on_start(system)
        rows[system] = start({**common, "system": system}, tell)
    ours, theirs = (rows[system].pop("outputs") for system in SYSTEMS)
    rows["pagedmlx"]["core"] = expected
    # With arrivals by the clock, steps fall differently in each run.
    at_once = all(job.arrival_s == 0 for job in trace.jobs)
    found = rows["pagedmlx"]["counts"]
    rows["pagedmlx"]["counts_equal_core"] = agree(found, expected) if at_once else None
    rows["pagedmlx"]["outputs_equal_mlx_lm"] = sum(ours[name] == theirs[name] for name in ours)
    rows["pagedmlx"]["num_outputs"] = len(ours)
    return rows


def agree(found: dict[str, int], expected: dict[str, int]) -> bool:
    """Whether an engine counted what the core counts by itself.

    An engine may choose the size of chunks by time, so steps and their largest number of blocks
    are only almost the same.
    """
    peak = expected["peak_used_blocks"]
    is_near = abs(found["peak_used_blocks"] - peak) <= max(2, PEAK_TOLERANCE * peak)
    return is_near and all(found[name] == expected[name] for name in TIMELESS)


def pool_blocks(trace: Trace, depth: int) -> int:
    """Blocks with which nobody has to wait, and one for each sequence to grow into."""
    jobs = trace.jobs
    slots = sum(job.n * (len(job.prompt) + job.num_outputs + 16) for job in jobs)
    system = _paged(slots, depth)
    run(_at_once(trace), system)
    return system.stats().peak_used_blocks + sum(job.n for job in jobs)


def expect(trace: Trace, num_blocks: int, depth: int) -> dict[str, int]:
    """The core's counts for a trace and a pool."""
    system = _paged(num_blocks * 16, depth)
    run(_at_once(trace), system)
    return core_counts(system)


def _paged(slots: int, depth: int) -> Paged:
    return Paged(slots, limits=replace(LIMITS, max_num_seqs=MAX_NUM_SEQS), depth=depth)


def _at_once(trace: Trace) -> Trace:
    jobs: tuple[Job, ...] = tuple(replace(job, arrival_s=0.0) for job in trace.jobs)
    return replace(trace, jobs=jobs, concurrency=None)
