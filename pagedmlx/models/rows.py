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


_MAX_HOLDERS = 3


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
        self._model = model
        self._body = _find_body(model)
        self._select: Select = _all_rows
        original = type(self._body)

        def call(body: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
            return self._select(original.__call__(body, *args, **kwargs))

        self._original = original
        self._selecting = type(original.__name__, (original,), {"__call__": call})

    @property
    def sees_last_states(self) -> bool:
        """Whether what is selected from are the last hidden states: no norm follows the body."""
        inside = {id(module) for module in self._body.modules()}
        outside = (each for each in self._model.modules() if id(each) not in inside)
        return not any("norm" in type(each).__name__.lower() for each in outside)

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
        wanted: Any = layers[0]
        for _ in range(_MAX_HOLDERS):
            holder = _find_holder(model, wanted)
            if holder is None:
                break
            # A mere box of layers is never called.
            if callable(holder):
                return holder
            wanted = holder
    raise UnsupportedModelError(
        f"{type(model).__module__.rpartition('.')[2]}: can't tell the model's body from its head",
        hint="logits for chosen rows only can't be computed, so the model isn't served",
    )


def _find_holder(model: nn.Module, wanted: Any) -> nn.Module | None:
    """The module inside the model that has another one as a child, in a list or by itself."""
    for module in model.modules():
        if module is not model and any(
            child is wanted or (isinstance(child, list) and any(each is wanted for each in child))
            for child in module.values()
        ):
            return module
    return None
