"""FlatRows: rows that a model's code reshapes again and again, and that stay the same in memory.

Models cut rows in heads, swap axes of which one has the length 1, and put heads together again; MLX
itself flattens what a matrix is multiplied with. None of that moves anything, but each view is a
node of the step's graph, and half of all nodes are such. A host needs a microsecond or two for
each, on the way of every token. Of views of rows that know their flat form, only the last is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pagedmlx.models.dry_run import distinct_modules


class FlatRows(mx.array):
    """An array that is (N, size) in another shape; MLX is lazy, so unused it costs nothing.

    Once it was changed in place it is an array like any other.

    Args:
        flat: (N, size).
        shape: Of as many elements, with at least one axis.
    """

    __slots__ = ("_flat",)

    def __init__(self, flat: mx.array, shape: tuple[int, ...]) -> None:
        view = flat.reshape(shape)
        super().__init__(view)
        # Made of an array MLX makes it a conversion, which is a node, too; now it is the view.
        super().__setitem__(slice(None), view)
        self._flat: mx.array | None = flat

    def reshape(self, *shape: Any, **others: Any) -> mx.array:
        """As MLX does it, but of the rows."""
        if len(shape) == 1 and not isinstance(shape[0], int):
            (shape,) = shape
        if self._flat is None or not shape or others:
            return super().reshape(shape, **others)
        if -1 in shape:
            shape = super().reshape(shape).shape
        return FlatRows(self._flat, shape)

    def transpose(self, *axes: Any, **others: Any) -> mx.array:
        """Likewise where only axes of length 1 move."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        shape = self._moved(order)
        if self._flat is None or shape is None or others:
            return super().transpose(*axes, **others)
        return FlatRows(self._flat, shape)

    def swapaxes(self, axis1: int, axis2: int, **others: Any) -> mx.array:
        """Likewise."""
        order = list(range(self.ndim))
        order[axis1], order[axis2] = order[axis2], order[axis1]
        return self.transpose(order, **others)

    def _moved(self, order: Sequence[int]) -> tuple[int, ...] | None:
        """The shape with its axes in another order; None if that changes the elements' order."""
        shape = self.shape
        axes = [axis + len(shape) if axis < 0 else axis for axis in order]
        if sorted(axes) != list(range(len(shape))):
            return None  # MLX says what is wrong with that
        long_ones = [axis for axis in axes if shape[axis] > 1]
        return tuple(shape[axis] for axis in axes) if long_ones == sorted(long_ones) else None

    def _forget(self) -> None:
        self._flat = None


def _forgetting(name: str) -> Callable[..., Any]:
    """A method of arrays that changes them in place."""
    change = getattr(mx.array, name)

    def method(self: FlatRows, *args: Any) -> Any:
        self._forget()
        return change(self, *args)

    return method


_IN_PLACE = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
for _name in ("__setitem__", *(f"__i{operation}__" for operation in _IN_PLACE.split())):
    setattr(FlatRows, _name, _forgetting(_name))


def flat_rows(x: mx.array) -> mx.array:
    """An array (..., size) as (N, size), another object than the array itself."""
    flat = x._flat if isinstance(x, FlatRows) else None
    if flat is not None and flat.shape[-1] == x.shape[-1]:
        return flat
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # no node of its own if it is that


class RowsNorm(nn.RMSNorm):
    """MLX's own, that gives flat rows for such."""

    def __call__(self, x: mx.array) -> mx.array:
        """Scale each row; of any shape."""
        return FlatRows(super().__call__(flat_rows(x)), x.shape)


def keep_rows_flat(model: nn.Module) -> None:
    """Have a model's norms pass flat rows on; in place."""
    for module in distinct_modules(model):
        if type(module) is nn.RMSNorm:
            module.__class__ = RowsNorm
