"""A whole batch through pagedmlx and through mlx-lm's BatchGenerator, in turns.

    python scripts/bench_batch.py --json FILE [--model smollm2] [--pairs 5] [--cases even,uneven]

``even`` is 16 prompts of 128 tokens, 64 out; ``uneven`` one of 1,500 beside seven of 60, 32 out.
Each system has a process of its own, loads the model once and then waits for its turns; who goes
first changes with each pair, because machines change their speed. What counts is the median of the
pairs' quotients. Nothing comes from a prefix cache: the prompts are the same in every turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from scripts.compare.processes import SYSTEMS, Running, inspect
from scripts.compare.traces import Job, tokens
from scripts.report import add_json_option, note, save

CASES = {"even": ((128,) * 16, 64), "uneven": ((1_500, *(60,) * 7), 32)}
"""Lengths of the prompts, and how many tokens each generates."""


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--model", default="smollm2", help="as pagedmlx takes it")
    add_json_option(parser, required=False)
    add("--pairs", type=int, default=5, help="turns of each system in the case even")
    add("--uneven-pairs", type=int, default=1, help="the same in uneven, where mlx-lm is slow")
    add("--cases", default="even,uneven")
    add("--scale", type=float, default=1.0, help="of all lengths; for tests")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    vocab_size = inspect(options.model)["vocab_size"]
    report: dict[str, Any] = {"model": options.model, "seed": options.seed, "cases": {}}
    for name in options.cases.split(","):
        lengths, num_outputs = CASES[name]
        generator = np.random.default_rng(options.seed)
        jobs = [
            Job(
                tokens(generator, max(1, int(length * options.scale)), vocab_size),
                max(2, int(num_outputs * options.scale)),
            )
            for length in lengths
        ]
        num_pairs = options.uneven_pairs if name == "uneven" else options.pairs
        report["cases"][name] = measure(options.model, jobs, num_pairs, name)
    if options.json:
        save(report, options.json)
    return 0


def measure(model: str, jobs: list[Job], num_pairs: int, name: str) -> dict[str, Any]:
    """Both systems, turn by turn."""
    num_blocks = sum(-(-job.num_slots // 16) + 1 for job in jobs)
    settings = {
        "num_blocks": num_blocks,
        "max_num_seqs": len(jobs),
        "enable_prefix_caching": False,
    }
    common = {
        "model": model,
        "jobs": [asdict(job) for job in jobs],
        "settings": settings,
        "max_num_seqs": len(jobs),
        "rounds": num_pairs,
    }
    turns: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    with ExitStack() as stack:
        running = {
            system: stack.enter_context(Running({**common, "system": system})) for system in SYSTEMS
        }
        for number in range(num_pairs):
            for system in SYSTEMS if number % 2 == 0 else reversed(SYSTEMS):
                running[system].ask()
                found = running[system].result()
                turns[system].append(found)
                note(f"{name}, {system}: {found['tokens_per_s']:.1f} tokens/s")
    ours, theirs = (turns[system] for system in SYSTEMS)
    quotients = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, theirs, strict=True)]
    peaks = [max(each["kv_held_peak_bytes"] for each in turn) for turn in (ours, theirs)]
    equal = sum(ours[0]["outputs"][key] == text for key, text in theirs[0]["outputs"].items())
    note(f"{name}: {statistics.median(quotients):.2f} times mlx-lm's tokens/s, median of pairs")
    note(f"{name}: K and V at most {peaks[0] / peaks[1]:.2f} times mlx-lm's")
    return {
        "requests": [[len(job.prompt), job.num_outputs] for job in jobs],
        "tokens_per_s": {s: [each["tokens_per_s"] for each in turns[s]] for s in SYSTEMS},
        "quotients": quotients,
        "median_quotient": statistics.median(quotients),
        "kv_peak_bytes": dict(zip(SYSTEMS, peaks, strict=True)),
        "kv_peak_quotient": peaks[0] / peaks[1],
        "num_outputs": len(jobs),
        "outputs_equal_mlx_lm": equal,
        "ttft_s": {s: [each["ttft_s"] for each in turns[s]] for s in SYSTEMS},
        "itl_s": {s: [each["itl_s"] for each in turns[s]] for s in SYSTEMS},
    }


if __name__ == "__main__":
    raise SystemExit(main())
