"""What the core's Python costs in each step: scheduler, block tables and batch arrays, no model.

    python scripts/bench_scheduler.py --json FILE [--sequences 1,16,...] [--pools 1000,...]

Every running sequence decodes; a step is scheduled while the one before is under way, as on a GPU.
``schedule`` plans the step, ``batch`` lays it out as arrays for the device, ``update`` takes in
its tokens. Times are the thread's own processor time, so that a busy machine changes little. A pool
counts as *full* when all blocks that nobody uses are cached: every block that a sequence takes then
evicts another one. What a thousand waiting requests add is measured beside.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.config import EngineConfig
from pagedmlx.core.batch import build_batch
from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.core.kv_manager import KVManager
from pagedmlx.core.request import Request
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.scheduler import Scheduler
from pagedmlx.core.step import Step, StepResult
from scripts.report import add_json_option, save

BLOCK_SIZE = 16
PROMPT = 24
"""Tokens of the shortest prompt; others have up to a block more, so that blocks end evenly."""
NUM_WARM = 4
SEQUENCES = (1, 16, 64, 256, 1024)
POOLS = (1_000, 10_000, 100_000, 1_000_000)
NUM_WAITING = 1_000
NUM_PROFILED = 12
PHASES = ("schedule", "batch", "update")


class Host:
    """A scheduler with sequences that decode, and a clock for each part of a step.

    Args:
        num_sequences: They all run.
        kv: The blocks.
        num_steps: They may take so many.
        num_more: How many others might run beside them.
    """

    def __init__(
        self,
        num_sequences: int,
        kv: KVManager,
        num_steps: int,
        *,
        num_more: int = 0,
    ) -> None:
        self.num_sequences = num_sequences
        self.scheduler = Scheduler(
            kv,
            EngineConfig(
                max_num_seqs=num_sequences + num_more,
                max_num_batched_tokens=max(2048, num_sequences),
            ),
        )
        self._under_way: deque[Step] = deque()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        for number in range(num_sequences):
            first, length = number * 1_000, PROMPT + number % BLOCK_SIZE
            self.add(str(number), tuple(range(first, first + length)), num_steps + 64)
        while self.scheduler.waiting or not all(s.num_output_tokens for s in self.running):
            self.step()
        for _ in range(NUM_WARM):
            self.step()

    @property
    def running(self) -> list[Any]:
        """What runs."""
        return self.scheduler.running

    def add(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        """A request of so many tokens."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, prompt, params))

    def step(self) -> None:
        """Plan a step, lay it out, and take in the one before."""
        begun = time.thread_time()
        step = self.scheduler.schedule()
        planned = time.thread_time()
        assert step is not None, "nothing can run"
        build_batch(step, BLOCK_SIZE)
        built = time.thread_time()
        self._under_way.append(step)
        self.seconds["schedule"] += planned - begun
        self.seconds["batch"] += built - planned
        if len(self._under_way) > 1:
            self._take_in(self._under_way.popleft())

    def _take_in(self, step: Step) -> None:
        sampled = {e.sequence.seq_id: 7 for e in step.scheduled if e.needs_logits}
        begun = time.thread_time()
        self.scheduler.update(StepResult(step.step_id, sampled))
        self.seconds["update"] += time.thread_time() - begun

    def measure(self, num_steps: int) -> dict[str, float]:
        """Microseconds for each sequence and step, by phase and in all."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        for _ in range(num_steps):
            self.step()
        assert len(self.running) == self.num_sequences
        scale = 1e6 / num_steps / self.num_sequences
        times = {name: seconds * scale for name, seconds in self.seconds.items()}
        return {"total": sum(times.values())} | times

    def profile(self, num_steps: int) -> tuple[float, list[dict[str, Any]]]:
        """Calls for each sequence and step, and the functions that take most of the time."""
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(num_steps):
            self.step()
        profiler.disable()
        stats: Any = pstats.Stats(profiler)
        # This script's own part is none of the core's.
        found = {
            key: row
            for key, row in stats.stats.items()
            if key[0] != __file__ and "thread_time" not in key[2]
        }
        total = sum(row[2] for row in found.values())
        rows = [
            {
                "function": f"{Path(file).name}:{name}" if line else name,
                "share": own / total,
                "calls_per_sequence_step": calls / num_steps / self.num_sequences,
            }
            for (file, line, name), (_, calls, own, _, _) in found.items()
        ]
        num_calls = sum(row["calls_per_sequence_step"] for row in rows)
        return num_calls, sorted(rows, key=lambda row: -row["share"])[:NUM_PROFILED]

    def close(self) -> None:
        """End all requests; the blocks are there for another host."""
        for sequence in tuple(self.running):
            self.scheduler.abort(sequence.request.request_id)
        while self._under_way:
            self._take_in(self._under_way.popleft())


def new_blocks(num_blocks: int) -> KVManager:
    """A pool of one group."""
    return KVManager((KVGroup(KVGroupKind.FULL, (0,)),), (num_blocks,), BLOCK_SIZE)


def fill(kv: KVManager, names: Iterator[int]) -> None:
    """Have every free block cached, in chains of up to a hundred.

    Args:
        kv: The blocks, of which nobody holds any.
        names: Numbers that no chain has begun with.
    """
    scheduler = Scheduler(kv, EngineConfig(max_num_batched_tokens=100 * BLOCK_SIZE))
    params = SamplingParams(max_tokens=1)
    while num_free := kv.pools[0].num_free_blocks:
        length = min(100, num_free) * BLOCK_SIZE
        prompt = (-1 - next(names), *range(length - 1))
        scheduler.add_request(Request("filler", prompt, params))
        while (step := scheduler.schedule()) is not None:
            sampled = {e.sequence.seq_id: 7 for e in step.scheduled if e.needs_logits}
            scheduler.update(StepResult(step.step_id, sampled))


def best_of(host: Host, num_steps: int, num_runs: int) -> dict[str, float]:
    """The quickest run: whatever else the machine does only adds to it."""
    return min((host.measure(num_steps) for _ in range(num_runs)), key=lambda run: run["total"])


def waiting(num_sequences: int, num_steps: int, num_runs: int) -> dict[str, float]:
    """What requests cost that wait for blocks: most of the pool, which is never free."""
    num_all = 2 * num_steps * num_runs + NUM_WARM
    num_blocks = num_sequences * num_blocks_of(num_all)
    host = Host(num_sequences, new_blocks(num_blocks), num_all, num_more=8)
    alone = best_of(host, num_steps, num_runs)
    prompt = tuple(range(-num_blocks * BLOCK_SIZE + 8, 0))
    for number in range(NUM_WAITING):
        host.add(f"waits {number}", prompt, 8)
    host.step()  # looks at them for the first time
    crowded = best_of(host, num_steps, num_runs)
    per_step = (crowded["total"] - alone["total"]) * num_sequences
    note(f"{NUM_WAITING:,} waiting requests: {per_step:.0f} us more for each step")
    return {"num_running": num_sequences, "num_waiting": NUM_WAITING, "us_per_step": per_step}


def num_blocks_of(num_steps: int) -> int:
    """Blocks that the longest sequence comes to hold in so many steps, and one more."""
    return -(-(PROMPT + BLOCK_SIZE + num_steps) // BLOCK_SIZE) + 1


def main() -> int:
    """Run the script."""
    options = parse()
    num_all = options.steps * (options.runs + 1) + NUM_WARM
    rows: list[dict[str, Any]] = []
    for num_blocks, is_full in product(options.pools, (False, True)):
        kv, names = new_blocks(num_blocks), count()
        for num_sequences in options.sequences:
            if num_sequences * num_blocks_of(num_all) <= num_blocks:  # else not all would run
                if is_full:
                    fill(kv, names)
                host = Host(num_sequences, kv, num_all)
                times = best_of(host, options.steps, options.runs)
                num_calls, functions = host.profile(options.steps)
                row = {"num_sequences": num_sequences, "num_blocks": num_blocks, "full": is_full}
                rows.append(row | {"us": times, "calls": num_calls, "functions": functions})
                tell(rows[-1])
                host.close()
    busiest = max(options.sequences, key=lambda count: (count <= 256, count))
    note(f"where the time goes with {busiest} sequences:")
    for row in [row for row in rows if row["num_sequences"] == busiest][-1]["functions"]:
        note(f"  {row['share']:6.1%}  {row['function']}")
    report = {
        "block_size": BLOCK_SIZE,
        "num_steps": options.steps,
        "rows": rows,
        "linear": spread(rows, "num_blocks", "num_sequences", at_least=16),
        "flat": spread(rows, "num_sequences", "num_blocks"),
        "waiting": waiting(busiest, options.steps, options.runs),
    }
    note(f"largest over smallest: {report['linear']:.2f} between numbers of sequences (from 16 on)")
    note(f"largest over smallest: {report['flat']:.2f} between pools")
    if options.json:
        save(report, options.json)
    return 0


def spread(rows: list[dict[str, Any]], same: str, varies: str, at_least: int = 0) -> float:
    """Largest over smallest time of a sequence's step where only ``varies`` does, at its worst."""
    groups: dict[tuple[Any, Any], list[float]] = {}
    for row in rows:
        if row[varies] >= at_least:
            groups.setdefault((row[same], row["full"]), []).append(row["us"]["total"])
    return max((max(times) / min(times) for times in groups.values()), default=1.0)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    add_json_option(parser, required=False)
    add("--sequences", type=numbers, default=SEQUENCES, metavar="N,N", help="how many run")
    add("--pools", type=numbers, default=POOLS, metavar="N,N", help="blocks of the pool")
    add("--steps", type=int, default=16, help="steps of a run, default 16: each fills a block once")
    add("--runs", type=int, default=5, help="runs, of which the quickest counts")
    return parser.parse_args()


def tell(row: dict[str, Any]) -> None:
    """A line for people."""
    times = row["us"]
    parts = ", ".join(f"{name} {times[name]:.2f}" for name in PHASES)
    full = "full" if row["full"] else "fresh"
    note(
        f"{row['num_sequences']:5} sequences, {row['num_blocks']:9,} blocks, {full:5}: "
        f"{times['total']:6.2f} us each ({parts}), {row['calls']:.0f} calls"
    )


def note(line: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
