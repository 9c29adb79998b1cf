"""Computes a model's logits for chosen rows only, by selecting between its body and its head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pagedmlx.errors import UnsupportedModelError

Select = Callable[[mx.array], mx.array]
"""Takes the body's output (rows, tokens, hidden) and returns the part that the head shall see."""


class RowSelection:
    """Selects rows of the output of a model's body while a ``with`` block lasts.

    The body (the module that holds the layers) gets a subclass of its own class for that time, so
    the model's code stays as it is and the head never sees the other rows.

    Args:
        model: The whole model, head included.

    Raises:
        UnsupportedModelError: The layers and the head are in one module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._body = _find_body(model)
        self._select: Select = _all_rows
        original = type(self._body)

        def call(body: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
            return self._select(original.__call__(body, *args, **kwargs))

        self._original = original
        self._selecting = type(original.__name__, (original,), {"__call__": call})

    @contextmanager
    def using(self, select: Select) -> Iterator[None]:
        """Pass the body's output through ``select`` within the block."""
        self._select = select
        self._body.__class__ = self._selecting
        try:
            yield
        finally:
            self._body.__class__ = self._original
            self._select = _all_rows


def _all_rows(hidden: mx.array) -> mx.array:
    return hidden


def _find_body(model: nn.Module) -> nn.Module:
    layers: Any = getattr(model, "layers", None)
    if layers:
        for module in model.modules():
            if module is not model and any(
                isinstance(child, list) and any(entry is layers[0] for entry in child)
                for child in module.values()
            ):
                return module
    raise UnsupportedModelError(
        f"{type(model).__module__.rpartition('.')[2]}: can't tell the model's body from its head",
        hint="logits for chosen rows only can't be computed, so the model isn't served",
    )
