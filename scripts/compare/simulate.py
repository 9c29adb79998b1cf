"""Runs traces through systems on a made-up clock and sums up what memory held; no model, no MLX."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scripts.compare.allocators import BuddyAllocator, FirstFitAllocator
from scripts.compare.systems import (
    Padded,
    Paged,
    Reserving,
    System,
    Usage,
    reserve_maximum,
    reserve_oracle,
    reserve_power_of_two,
)
from scripts.compare.traces import Trace

STEP_S = 0.02
TOKEN_S = 0.0002
"""What a step and each of its tokens take on the clock, the same for all systems."""

BLOCK_SIZES = (8, 16, 32, 64, 128)
CONCURRENCIES = (1, 2, 4, 8, 16)
SERIES_POINTS = 150

SCHEMES: dict[str, Callable[[Trace], System]] = {
    "maximum": lambda t: Reserving(BuddyAllocator(t.budget_slots), reserve_maximum(t.max_len)),
    "power of two": lambda t: Reserving(
        BuddyAllocator(t.budget_slots), reserve_power_of_two(t.max_len)
    ),
    "oracle": lambda t: Reserving(BuddyAllocator(t.budget_slots), reserve_oracle),
    "padded": lambda t: Padded(t.budget_slots),
    "pagedmlx": lambda t: Paged(t.budget_slots),
}
"""The reservations with a buddy allocator, as the paper has them."""

FIRST_FIT: dict[str, Callable[[Trace], System]] = {
    "maximum": lambda t: Reserving(FirstFitAllocator(t.budget_slots), reserve_maximum(t.max_len)),
    "power of two": lambda t: Reserving(
        FirstFitAllocator(t.budget_slots), reserve_power_of_two(t.max_len)
    ),
    "oracle": lambda t: Reserving(FirstFitAllocator(t.budget_slots), reserve_oracle),
}
"""The same without the buddy allocator's rounding: better than the paper assumes."""


@dataclass(slots=True)
class Run:
    """What memory held, step by step.

    Attributes:
        starts: When each step began, in seconds on the made-up clock.
        durations: How long it took.
        usages: What memory held meanwhile.
        python_s: Processor time of the system's own Python.
    """

    starts: list[float] = field(default_factory=list[float])
    durations: list[float] = field(default_factory=list[float])
    usages: list[Usage] = field(default_factory=list[Usage])
    python_s: float = 0.0

    def mean(
        self, value: Callable[[Usage], float], where: Callable[[Usage], bool] = lambda _: True
    ) -> float:
        """A mean over time, of the steps where something holds; 0 when it never does."""
        chosen = [
            (duration, value(usage))
            for duration, usage in zip(self.durations, self.usages, strict=True)
            if where(usage)
        ]
        total = sum(duration for duration, _ in chosen)
        return sum(duration * each for duration, each in chosen) / total if total else 0.0


def run(trace: Trace, system: System) -> Run:
    """Feed a trace to a system until all of it is done."""
    record, now, num_in_flight = Run(), 0.0, 0
    waiting = list(reversed(list(enumerate(trace.jobs))))
    limit = trace.concurrency or len(waiting)
    while True:
        while waiting and num_in_flight < limit and waiting[-1][1].arrival_s <= now:
            system.add(*waiting.pop())
            num_in_flight += 1
        begun = time.thread_time()
        outcome = system.step()
        record.python_s += time.thread_time() - begun
        if outcome is None:
            if not waiting:
                return record
            now = waiting[-1][1].arrival_s
            continue
        usage, ended = outcome
        num_in_flight -= len(ended)
        record.starts.append(now)
        record.durations.append(STEP_S + TOKEN_S * usage.num_tokens)
        record.usages.append(usage)
        now += record.durations[-1]


def summary(trace: Trace, record: Run, num_cached: int = 0) -> dict[str, Any]:
    """Numbers of one run, in slots and shares.

    Shares are of all memory that is held, or free while somebody waits for memory: once the budget
    is short that is the whole budget, as in the paper's figure. ``num_cached`` tokens of the
    prompts didn't have to be computed; what was computed beyond the others is work done again for
    sequences that had lost their memory.
    """
    parts = {
        name: record.mean(lambda usage, name=name: getattr(usage, name))
        for name in ("needed", "reserved", "internal", "external")
    }
    total = sum(parts.values())
    is_short = any(usage.is_short for usage in record.usages)
    fit = record.mean(lambda u: u.num_running, lambda u: u.is_short or not is_short)
    held = record.mean(lambda u: u.held)
    running = record.mean(lambda u: u.num_running)
    num_computed = sum(usage.num_tokens for usage in record.usages)
    num_wanted = sum(job.n * job.num_slots for job in trace.jobs) - num_cached
    return {
        "shares": {name: part / total for name, part in parts.items()},
        "waste": 1 - parts["needed"] / total,
        "mean_slots": parts,
        "shared_slots": record.mean(lambda u: u.logical) - parts["needed"],
        "held_slots_per_sequence": held / running,
        "peak_held_slots": max(usage.held for usage in record.usages),
        "sequences_at_once": fit if is_short else max(u.num_running for u in record.usages),
        "memory_was_short": is_short,
        "num_steps": len(record.usages),
        "num_computed_tokens": num_computed,
        "recomputed_share": num_computed / num_wanted - 1,
        "clock_s": record.starts[-1] + record.durations[-1],
        "python_us_per_sequence_step": record.python_s
        / sum(usage.num_running for usage in record.usages)
        * 1e6,
        "series": series(record),
    }


def series(record: Run, points: int = SERIES_POINTS) -> dict[str, list[float]]:
    """Slots over time, thinned to the fullest step of every stretch."""
    stride = -(-len(record.usages) // points)
    picked = [
        max(range(at, min(at + stride, len(record.usages))), key=lambda i: record.usages[i].held)
        for at in range(0, len(record.usages), stride)
    ]
    return {
        "t_s": [round(record.starts[index], 2) for index in picked],
        "held": [record.usages[index].held for index in picked],
        "needed": [record.usages[index].needed for index in picked],
        "running": [record.usages[index].num_running for index in picked],
    }


def compare(trace: Trace) -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemes on one trace; our own last, without its prefix cache too where that is used."""
    for name, make in SCHEMES.items():
        system = make(trace)
        record = run(trace, system)
        if isinstance(system, Paged):
            core = core_counts(system)
            row = {**summary(trace, record, core["num_cached_tokens"]), "core": core}
            if core["num_cached_tokens"]:
                plain = Paged(trace.budget_slots, enable_prefix_caching=False)
                row["without_prefix_caching"] = _beside(trace, plain)
        else:
            row = summary(trace, record)
        if name in FIRST_FIT:
            row["first_fit"] = _beside(trace, FIRST_FIT[name](trace))
        yield name, row


def by_concurrency(
    make: Callable[[int], Trace], counts: Iterable[int] = CONCURRENCIES
) -> Iterator[tuple[int, dict[str, dict[str, Any]]]]:
    """A closed loop at several numbers of requests in flight: what is held, scheme by scheme."""
    for count in counts:
        trace = make(count)
        yield count, {name: _beside(trace, scheme(trace)) for name, scheme in SCHEMES.items()}


def _beside(trace: Trace, system: System) -> dict[str, Any]:
    """A row without its points over time."""
    record = run(trace, system)
    num_cached = system.stats().num_cached_tokens if isinstance(system, Paged) else 0
    row = summary(trace, record, num_cached)
    del row["series"]
    return row


def core_counts(system: Paged) -> dict[str, int]:
    """What the core counted, for comparison with a real engine's counts."""
    stats = system.stats()
    return {
        name: getattr(stats, name)
        for name in (
            *("num_steps", "num_prompt_tokens", "num_cached_tokens", "num_computed_tokens"),
            *("num_output_tokens", "num_preemptions", "num_copies", "peak_used_blocks"),
        )
    }


def sweep(trace: Trace, sizes: Iterable[int] = BLOCK_SIZES) -> Iterator[dict[str, Any]]:
    """The same trace with other block sizes: waste against the table's size and Python's time."""
    for size in sizes:
        system = Paged(trace.budget_slots, size)
        record = run(trace, system)
        row = summary(trace, record)
        yield {
            "block_size": size,
            "waste": row["waste"],
            "unfilled": row["shares"]["reserved"] + row["shares"]["internal"],
            "sequences_at_once": row["sequences_at_once"],
            "num_preemptions": system.stats().num_preemptions,
            # Four bytes for each block that a table names.
            "table_bytes_per_sequence": 4 * row["held_slots_per_sequence"] / size,
            "python_us_per_sequence_step": row["python_us_per_sequence_step"],
        }
