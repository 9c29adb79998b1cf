"""A model under load on this machine: pagedmlx beside mlx-lm's BatchGenerator, memory and speed.

    python scripts/bench_load.py --json FILE [--model 8b] [--cases short,long,...] [--scale 1]

Each system runs every case in a process of its own, after a few short requests. mlx-lm goes first,
and pagedmlx gets a quarter of the memory that mlx-lm took above the weights: for the pool and all
that a step needs. The case ``cliff`` also runs one after another.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from scripts.compare.processes import RealRunError, inspect, start
from scripts.compare.traces import Job, Maker, tokens
from scripts.report import note, save
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
SHARE = 4
"""pagedmlx gets this part of mlx-lm's memory."""


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--model", default="8b", help="8b, 8b-4bit, mini, or as pagedmlx takes it")
    add("--json", required=True, metavar="FILE", help="report, written after each case")
    add("--cases", default=",".join((*CASES, CHAT)))
    add("--rows", type=int, metavar="N", help="most tokens that a step of pagedmlx computes")
    add("--scale", type=float, default=1.0, help="of all lengths; for tests")
    options = parser.parse_args()
    names = options.cases.split(",")
    if unknown := set(names) - {*CASES, CHAT}:
        parser.error(f"--cases: no case {', '.join(sorted(unknown))}")
    shape = SHAPES.get(options.model)
    vocab_size = shape["vocab_size"] if shape else inspect(options.model)["vocab_size"]
    settings = {}
    if options.rows is not None:
        settings = {"prefill_chunk_size": options.rows, "max_num_batched_tokens": options.rows}
    report: dict[str, Any] = {"model": options.model, "settings": settings, "cases": {}}
    for name in names:
        jobs = make_jobs(name, options.scale, vocab_size)
        try:
            report["cases"][name] = measure(name, options.model, jobs, settings)
        except RealRunError as error:  # the other cases are still wanted
            report["cases"][name] = {"error": str(error)}
            note(f"{name}: {error}")
        save(report, options.json)  # what is there so far, should a later case never end
    return 1 if any("error" in each for each in report["cases"].values()) else 0


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


def measure(name: str, model: str, jobs: list[Job], settings: dict[str, Any]) -> dict[str, Any]:
    """One case, and what is asked of it."""

    def run(system: str, max_num_seqs: int = len(jobs), **more: object) -> dict[str, Any]:
        found = start(
            {
                "system": system,
                "model": model,
                "jobs": [asdict(job) for job in jobs],
                "settings": {"max_num_seqs": max_num_seqs, **settings, **more},
                "max_num_seqs": max_num_seqs,
            }
        )
        del found["series"]
        note(f"{name}, {system}: {found['tokens_per_s']:.1f} tokens/s in {found['wall_s']:.1f} s")
        return found

    theirs = run("mlx-lm")
    budget = theirs["peak_above_weights_bytes"] // SHARE
    memory = memory_setting(budget, theirs)
    ours = run("pagedmlx", **memory)
    row: dict[str, Any] = {
        "requests": [[len(job.prompt), job.num_outputs] for job in jobs],
        "pagedmlx": ours,
        "mlx_lm": theirs,
        "memory_setting": memory,
        "budget_bytes": budget,
        "times_tokens_per_s": ours["tokens_per_s"] / theirs["tokens_per_s"],
        "times_decode": quotient(ours, theirs, "decode_tokens_per_s"),
        "times_peak_memory": quotient(ours, theirs, "peak_above_weights_bytes"),
        "times_budget": ours["peak_above_weights_bytes"] / budget,
        "times_kv_peak": quotient(ours, theirs, "kv_held_peak_bytes"),
        "outputs_equal": sum(
            ours["outputs"][key] == value for key, value in theirs["outputs"].items()
        ),
    }
    if name == "cliff":
        row["one_by_one"] = run("pagedmlx", max_num_seqs=1, **memory)
        row["times_one_by_one"] = ours["wall_s"] / row["one_by_one"]["wall_s"]
    note(f"{name}: { {key: value for key, value in row.items() if key.startswith('times')} }")
    return row


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
