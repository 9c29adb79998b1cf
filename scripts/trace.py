"""How long the GPU was busy, by torch's profiler where torch is installed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Busy:
    """What the device did.

    Attributes:
        seconds: With at least one launch under way.
        idle_share: Of the time from the first launch to the end of the last, what was without.
        launches: How many.
    """

    seconds: float
    idle_share: float
    launches: int


def trace(run: Callable[[], object]) -> Busy | None:
    """Run something, wait for the device, and tell what it did; None without torch."""
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
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    if not spans:
        return None
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return Busy(busy / 1e6, 1 - busy / (end - spans[0][0]), len(spans))
