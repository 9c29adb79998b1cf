"""How long the GPU was busy, by torch's profiler where torch is installed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Busy:
    """What the device did.

    Attributes:
        seconds: With at least one launch under way.
        idle_share: Of the time from the first launch to the end of the last, what was without.
        between_share: Likewise, what was without between a step's last launch and the first of the
            next that takes some time; None where nothing says where steps end.
        launches: How many.
    """

    seconds: float
    idle_share: float
    between_share: float | None
    launches: int


SHORT_US = 5.0
"""Launches that take less may only ready what a step begins with."""


def trace(run: Callable[[], object], last_of_step: str = "") -> Busy | None:
    """Run something, wait for the device, and tell what it did; None without torch.

    Args:
        run: What to do.
        last_of_step: Part of the name of a step's last launch, if there are steps.
    """
    try:
        from torch.profiler import ProfilerActivity, profile  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    mx.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        mx.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    launches = [
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return summed_up(launches, last_of_step)


def summed_up(launches: Iterable[tuple[float, float, str]], last_of_step: str = "") -> Busy | None:
    """What a trace says.

    Args:
        launches: Begin and end in microseconds, and name.
        last_of_step: As for ``trace``.
    """
    launches = sorted(launches)
    if not launches:
        return None
    busy, between, is_between, end = 0.0, 0.0, False, launches[0][0]
    for start, stop, name in launches:
        busy += max(0.0, stop - max(start, end))
        if is_between:
            between += max(0.0, start - end)
            is_between = stop - start < SHORT_US
        is_between |= bool(last_of_step) and last_of_step in name
        end = max(end, stop)
    whole = end - launches[0][0]
    has_ends = bool(last_of_step) and any(last_of_step in name for *_, name in launches)
    return Busy(busy / 1e6, 1 - busy / whole, between / whole if has_ends else None, len(launches))
