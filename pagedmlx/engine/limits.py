"""What MLX is told of memory while an engine lives."""

from __future__ import annotations

import mlx.core as mx


class MemoryLimits:
    """Holds MLX to a budget, and keeps what it uses resident; for the whole process.

    MLX hands work to the device ahead of time, with memory for all of it. Above its limit it waits
    for the device first, so a budget is kept at some cost in speed rather than exceeded.

    On Metal the memory that is used stays wired, as in mlx-lm's own generation: a model nearly as
    large as memory would else be paged out between steps.

    Args:
        limit_bytes: All that the process may use on the device; None leaves MLX's own limit.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit = None if limit_bytes is None else mx.set_memory_limit(limit_bytes)
        self._wired = None
        if mx.metal.is_available():
            self._wired = mx.set_wired_limit(
                int(mx.device_info()["max_recommended_working_set_size"])
            )

    def undo(self) -> None:
        """Set the limits as they were before; idempotent."""
        if self._limit is not None:
            mx.set_memory_limit(self._limit)
        if self._wired is not None:
            mx.set_wired_limit(self._wired)
        self._limit = self._wired = None
