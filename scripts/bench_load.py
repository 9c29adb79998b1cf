"""A model under load on this machine: pagedmlx beside mlx-lm's BatchGenerator, memory and speed.

    python scripts/bench_load.py --json FILE [--model 8b] [--cases short,long,...] [--scale 1]

Each case runs twice, because much is compiled when it is used for the first time: the first time
after a few short requests, and once more. mlx-lm goes first, in one process for all cases.
pagedmlx gets less than a quarter of the memory that mlx-lm took above the weights, for the pool and
all that a step needs, in a process for each case. The case ``cliff`` also runs one after another.
With ``--together`` these processes load at the same time, and measure what they measure at load
beside each other; rounds still run by themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from scripts.compare.processes import RealRunError, Running, inspect
from scripts.compare.traces import Job, Maker, tokens
from scripts.report import add_json_option, note, save, save_so_far
from scripts.shapes import SHAPES

CASES: dict[str, tuple[tuple[int, ...], int]] = {
    "short": ((512,) * 16, 128),
    "long": ((4096,) * 16, 128),
    "uneven": ((16384, *(512,) * 7), 128),
    "cliff": ((30_000, 5_000, 10), 256),
}
"""Lengths of the prompts, and how many tokens each generates."""
CHAT = "chat"
NUM_CHATS = 64
SHARE = 0.245
"""pagedmlx gets this part of mlx-lm's memory: a quarter also with what it is off by."""
ROUNDS = ("first", "again")


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--model", default="8b", help="8b, 8b-4bit, mini, or as pagedmlx takes it")
    add_json_option(parser, help="report, written after each case")
    add("--cases", default=",".join((*CASES, CHAT)))
    add("--rows", type=int, metavar="N", help="most tokens that a step of pagedmlx computes")
    add(
        "--together",
        action="store_true",
        help="load pagedmlx for all cases at once, where there is memory for it",
    )
    add("--once", action="store_true", help="the first time only")
    add("--scale", type=float, default=1.0, help="of all lengths; for tests")
    options = parser.parse_args()
    names = options.cases.split(",")
    if unknown := set(names) - {*CASES, CHAT}:
        parser.error(f"--cases: no case {', '.join(sorted(unknown))}")
    shape = SHAPES.get(options.model)
    vocab_size = shape["vocab_size"] if shape else inspect(options.model)["vocab_size"]
    settings: dict[str, Any] = {}
    if options.rows is not None:
        settings = {"prefill_chunk_size": options.rows, "max_num_batched_tokens": options.rows}
    report: dict[str, Any] = {
        "model": options.model,
        "settings": settings,
        "loaded_together": options.together,
        "cases": {},
    }
    cases = {name: make_jobs(name, options.scale, vocab_size) for name in names}
    theirs: dict[str, dict[str, Any]] = {}
    rounds = ROUNDS[:1] if options.once else ROUNDS
    common = {"model": options.model, "rounds": len(rounds) * len(names)}
    num_seqs = max(map(len, cases.values()))
    try:
        with Running({**common, "system": "mlx-lm", "max_num_seqs": num_seqs}) as running:
            for name, jobs in cases.items():
                theirs[name] = take_rounds(running, jobs, rounds, f"{name}, mlx-lm")
    except RealRunError as error:  # it may want more memory than there is
        note(f"mlx-lm: {error}")
        rest = {name: {"error": f"mlx-lm: {error}"} for name in cases if name not in theirs}
        report["cases"].update(rest)
    runs = {
        name: Case(common, settings, cases[name], theirs[name], one_by_one=name == "cliff")
        for name in theirs
    }
    with ExitStack() as ends:
        if options.together:
            for each in runs.values():
                each.start(ends)
            for each in runs.values():
                each.wait_until_loaded()
        for name, each in runs.items():
            try:
                report["cases"][name] = each.measure(name)
            except RealRunError as error:  # the other cases are still wanted
                report["cases"][name] = {"error": str(error), "mlx_lm": theirs[name]}
                note(f"{name}: {error}")
            save_so_far(report, options.json)
    save(report, options.json)
    return 1 if any("error" in each for each in report["cases"].values()) else 0


def take_rounds(
    running: Running, jobs: list[Job], names: Iterable[str], what: str
) -> dict[str, Any]:
    """A case, once for each name."""
    rounds: dict[str, Any] = {}
    for name in names:
        running.ask(jobs)
        found = rounds[name] = running.result()
        del found["series"]
        note(f"{what}, {name}: {found['tokens_per_s']:.1f} tokens/s in {found['wall_s']:.1f} s")
    return rounds


def make_jobs(name: str, scale: float, vocab_size: int) -> list[Job]:
    """The requests of a case."""
    if name == CHAT:
        maker = Maker(seed=0, vocab_size=vocab_size, rate=0, count=NUM_CHATS)
        jobs = maker.make(CHAT).jobs
        return [
            Job(job.prompt[: max(1, int(len(job.prompt) * scale))], scaled(job.num_outputs, scale))
            for job in jobs
        ]
    lengths, num_outputs = CASES[name]
    generator = np.random.default_rng(0)
    return [
        Job(tokens(generator, scaled(length, scale), vocab_size), scaled(num_outputs, scale))
        for length in lengths
    ]


def scaled(number: int, scale: float) -> int:
    """At least 2, as one token has no time between tokens."""
    return max(2, int(number * scale))


class Case:
    """One case by pagedmlx, and what is asked of it.

    Args:
        common: Of the jobs of all processes.
        settings: Of the engine.
        jobs: The requests.
        theirs: What mlx-lm came to.
        one_by_one: Whether the requests also run one after another.
    """

    def __init__(
        self,
        common: dict[str, Any],
        settings: dict[str, Any],
        jobs: list[Job],
        theirs: dict[str, dict[str, Any]],
        *,
        one_by_one: bool,
    ) -> None:
        self._jobs, self._theirs = jobs, theirs
        self._budget = int(
            SHARE * max(each["peak_above_weights_bytes"] for each in theirs.values())
        )
        self._memory = memory_setting(self._budget, next(iter(theirs.values())))
        limits = {"enable_prefix_caching": False, **settings, **self._memory}
        self._processes = {
            way: {**common, "system": "pagedmlx", "settings": {**limits, "max_num_seqs": count}}
            for way, count in (
                ("pagedmlx", len(jobs)),
                *([("one by one", 1)] if one_by_one else []),
            )
        }
        self._started: dict[str, Running] = {}

    def start(self, ends: ExitStack) -> None:
        """Load the model in all processes that this takes, now.

        Args:
            ends: When they end.
        """
        for way, job in self._processes.items():
            self._started[way] = ends.enter_context(Running(job))

    def wait_until_loaded(self) -> None:
        """Until all that were started can begin, or have failed, which the measurement will say."""
        for running in self._started.values():
            with suppress(RealRunError):
                running.wait_until_loaded()

    def measure(self, name: str) -> dict[str, Any]:
        """Carry the load.

        Args:
            name: The case's.
        """
        theirs = self._theirs
        found = {way: self._run(way, f"{name}, {way}") for way in self._processes}
        ours = found["pagedmlx"]
        row: dict[str, Any] = {
            "requests": [[len(job.prompt), job.num_outputs] for job in self._jobs],
            "pagedmlx": ours,
            "mlx_lm": theirs,
            "memory_setting": self._memory,
            "budget_bytes": self._budget,
        }
        one_by_one = found.get("one by one")
        for each, a in ours.items():
            b = theirs[each]
            row[each] = {
                "times_tokens_per_s": a["tokens_per_s"] / b["tokens_per_s"],
                "times_decode": quotient(a, b, "decode_tokens_per_s"),
                "times_peak_memory": quotient(a, b, "peak_above_weights_bytes"),
                "times_budget": a["peak_above_weights_bytes"] / self._budget,
                "times_kv_peak": quotient(a, b, "kv_held_peak_bytes"),
                "outputs_equal": sum(
                    a["outputs"][key] == text for key, text in b["outputs"].items()
                ),
            }
            if one_by_one is not None:
                row[each]["times_one_by_one"] = a["wall_s"] / one_by_one[each]["wall_s"]
            note(f"{name}, {each}: {row[each]}")
        if one_by_one is not None:
            row["one_by_one"] = one_by_one
        return row

    def _run(self, way: str, what: str) -> dict[str, Any]:
        if way in self._started:
            return take_rounds(self._started[way], self._jobs, self._theirs, what)
        with Running(self._processes[way]) as running:
            return take_rounds(running, self._jobs, self._theirs, what)


def memory_setting(budget: int, theirs: dict[str, Any]) -> dict[str, Any]:
    """How an engine is told that it has so much above the weights."""
    if theirs["on_gpu"]:
        return {
            "gpu_memory_utilization": (theirs["weights_bytes"] + budget) / theirs["device_bytes"]
        }
    return {"kv_cache_memory": budget}


def quotient(ours: dict[str, Any], theirs: dict[str, Any], key: str) -> float | None:
    """Ours by theirs where both have it."""
    return ours[key] / theirs[key] if ours[key] and theirs[key] else None


if __name__ == "__main__":
    raise SystemExit(main())
