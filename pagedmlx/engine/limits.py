"""What MLX is told of memory while an engine lives."""

from __future__ import annotations

import threading
from collections.abc import Callable

import mlx.core as mx


class MemoryLimits:
    """Holds MLX to a budget, and keeps what it uses resident; for the whole process.

    MLX hands work to the device ahead of time, with memory for all of it. Above its limit it waits
    for the device first, so a budget is kept at some cost in speed rather than exceeded.

    On Metal the memory that is used stays wired, as in mlx-lm's own generation: a model nearly as
    large as memory would else be paged out between steps.

    Of several, which may end in any order, the newest has the word: its limit counts what the
    others use, and without one there is none. MLX's own limits come back after the last.

    Args:
        limit_bytes: All that the process may use on the device; None is MLX's own limit.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        # First what may fail, so that nothing is held then.
        if mx.metal.is_available():
            _WIRED.hold(self, int(mx.device_info()["max_recommended_working_set_size"]))
        _MEMORY.hold(self, limit_bytes)

    @staticmethod
    def leaves(num_bytes: int) -> bool:
        """Whether so much can be allocated within the limit in force, if any."""
        limit = _MEMORY.newest
        return limit is None or mx.get_active_memory() + num_bytes <= limit

    def undo(self) -> None:
        """Say no more of the limits; idempotent."""
        _MEMORY.let_go(self)
        _WIRED.let_go(self)


class _Limit:
    """One of MLX's limits, and who holds it.

    Args:
        change: Sets it and returns what it was.

    Attributes:
        newest: The value in force; None is MLX's own.
    """

    def __init__(self, change: Callable[[int], int]) -> None:
        self.newest: int | None = None
        self._change = change
        self._own: int | None = None
        self._held: dict[MemoryLimits, int | None] = {}
        # Engines of one process may load and close on their own threads.
        self._lock = threading.Lock()

    def hold(self, holder: MemoryLimits, value: int | None) -> None:
        with self._lock:
            self._held[holder] = value
            self._apply()

    def let_go(self, holder: MemoryLimits) -> None:
        with self._lock:
            if holder in self._held:
                del self._held[holder]
                self._apply()

    def _apply(self) -> None:
        self.newest = next(reversed(self._held.values()), None)
        if self.newest is not None:
            before = self._change(self.newest)
            self._own = before if self._own is None else self._own
        elif self._own is not None:
            self._change(self._own)
            self._own = None


# MLX has one of each for the process, and so who holds it must be known in all of it.
_MEMORY = _Limit(lambda value: mx.set_memory_limit(value))
_WIRED = _Limit(lambda value: mx.set_wired_limit(value))
