"""Adds a layer's product to the residual stream within the product itself: one launch for two.

The model's code stays as it is: in its ``x + layer(y)`` the layer gives an array that knows how to
be added. MLX is lazy, so the plain product that it also is costs nothing if nobody looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pagedmlx.models.dry_run import distinct_modules, dry_run
from pagedmlx.models.flat_rows import FlatRows, flat_rows
from pagedmlx.models.linear import TransposedLinear


def add_in_products(model: nn.Module) -> int:
    """Have linear layers add their products to what the model adds them to; in place.

    Only MLX's own ``Linear`` without a bias is changed. A dry run, which computes nothing, shows
    whose products the model always adds to an array of the same shape. Such a sum is rounded once
    and no longer twice, so results differ by that.

    Args:
        model: One of mlx-lm's models, its weights final.

    Returns:
        How many additions one pass through the model saves.
    """
    candidates = [
        _Watched(module, name, layer)
        for module in distinct_modules(model)
        for name, layer in module.items()
        if type(layer) is nn.Linear and set(layer) == {"weight"}
    ]
    with ExitStack() as undo:
        for watched in candidates:
            watched.module[watched.name] = watched
            undo.callback(watched.module.__setitem__, watched.name, watched.layer)
        if not dry_run(model, num_tokens=2):  # one row would not show it
            return 0
    adding = [watched for watched in candidates if watched.is_always_added]
    for watched in adding:
        watched.module[watched.name] = AddingLinear(watched.layer.weight)
    return sum(watched.num_calls for watched in adding)


class Product(FlatRows):
    """A product which, where it is added to an array of its own shape, has a way of its own.

    Args:
        flat: (N, size); the product.
        shape: Of as many elements.
        add_to: That way.
    """

    __slots__ = ("_add_to",)

    def __init__(
        self, flat: mx.array, shape: tuple[int, ...], add_to: Callable[[mx.array], mx.array]
    ) -> None:
        super().__init__(flat, shape)
        self._add_to: Callable[[mx.array], mx.array] | None = add_to

    def __add__(self, other: Any) -> mx.array:
        fits = (
            isinstance(other, mx.array) and other.shape == self.shape and other.dtype == self.dtype
        )
        return self._add_to(other) if fits and self._add_to else super().__add__(other)

    # For ``x + product`` Python asks the more special class first, which is this one.
    __radd__ = __add__

    def _forget(self) -> None:
        super()._forget()
        self._add_to = None


class AddingLinear(TransposedLinear):
    """A linear layer without a bias, for use where its output is added to something.

    Args:
        weight: (output size, input size)
    """

    def __init__(self, weight: mx.array) -> None:
        super().__init__(weight)

    def __call__(self, x: mx.array) -> mx.array:
        """Multiply with the weights; (..., input size) to (..., output size)."""
        if _is_one_row(x):
            return super().__call__(x)  # MLX is fastest with one row where nothing is added
        # MLX would take (T, 1, size) for T products. Reshaped now, as x may be changed in place.
        rows = flat_rows(x)
        product = rows @ self._transposed
        shape = (*x.shape[:-1], product.shape[-1])
        return Product(product, shape, lambda other: self._added(other, rows))

    def _added(self, other: mx.array, rows: mx.array) -> mx.array:
        return FlatRows(mx.addmm(flat_rows(other), rows, self._transposed), other.shape)


def _is_one_row(x: mx.array) -> bool:
    return x.size == x.shape[-1]


class _Watched:
    """Stands in for a layer during the dry run and counts what becomes of its products."""

    def __init__(self, module: nn.Module, name: str, layer: Any) -> None:
        self.module = module
        self.name = name
        self.layer = layer
        self._num_sums: list[int] = []

    def __call__(self, x: mx.array) -> mx.array:
        index = self.num_calls
        self._num_sums.append(0)
        product = self.layer(x)
        if _is_one_row(x):
            return product
        return Product(
            flat_rows(product), product.shape, lambda other: self._added(other, product, index)
        )

    def __getattr__(self, name: str) -> Any:
        """What a model looks at besides, such as the weights' type."""
        return getattr(self.layer, name)

    def _added(self, other: mx.array, product: mx.array, index: int) -> mx.array:
        self._num_sums[index] += 1
        return mx.add(other, product)  # ``other`` may be a product too, but is none that adds

    @property
    def num_calls(self) -> int:
        return len(self._num_sums)

    @property
    def is_always_added(self) -> bool:
        """Whether each product is added once; one that is added twice would be computed twice."""
        return bool(self._num_sums) and all(count == 1 for count in self._num_sums)
