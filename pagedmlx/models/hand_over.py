"""HandOver: gives the device the first layers of a step while the host builds the others."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

HAND_OVER_LAYERS = 4
"""At every so many layers with attention, the first one among them, the device is given what there
is so far.

On an H200, four of the 8B shape are half of the launches that MLX hands over together."""

LARGE_ROWS = 256
"""Calls with more rows are handed over at each of these layers: every one keeps the device busy for
longer than the host needs for the next, and what is computed for it is large."""


class HandOver:
    """What layers compute is allocated when it is handed over, and free when the device is done.

    MLX, too, waits for the device above its limit of memory. But it may go on before what is done
    is free, and so exceed its limit by what a layer needs or more. With few rows that is little; so
    small steps, and graphs of many layers, which are for such, may leave it at that.

    Attributes:
        memory_is_short: Whether to wait until the device is done with all that it was given.
    """

    def __init__(self) -> None:
        self._num_layers = 0
        self.memory_is_short: Callable[[], bool] = lambda: False

    def begin(self) -> None:
        """A call of the model begins with its first layer."""
        self._num_layers = 0

    def layer(self, num_rows: int, output: mx.array) -> None:
        """Take what the next layer's attention has come to; the device may have it now.

        Args:
            num_rows: Of the call.
            output: What to compute.
        """
        if num_rows > LARGE_ROWS or self._num_layers % HAND_OVER_LAYERS == 0:
            self.give(output)
        self._num_layers += 1

    def give(self, output: mx.array) -> None:
        """Let the device begin with this, and wait for it where memory is short."""
        mx.async_eval(output)
        if self.memory_is_short():
            mx.synchronize()
