"""Sends the attention of an mlx-lm model to the blocks, without touching the model's code.

mlx-lm's models import one function, ``scaled_dot_product_attention``; every name that a model's
modules bind to it is rebound here, and bound back when the last user is gone. So is ``swiglu``,
which passes flat rows on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, TracebackType
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base

from pagedmlx.models.flat_rows import FlatRows, flat_rows

# Engines of one process may install and undo on their own threads.
_LOCK = threading.Lock()


class _StandIn:
    """Stands in for one of mlx-lm's functions under one name of one module."""

    original: ClassVar[Callable[..., Any]]

    def __init__(self) -> None:
        self.num_users = 0


class BlockAttention(_StandIn):
    """A layer cache of ours takes the call when it can (``attend_blocks``).

    What it can't take, and every call with another cache, goes to mlx-lm's function on the arrays
    that were passed.
    """

    original = staticmethod(base.scaled_dot_product_attention)

    def __call__(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        **unknown: Any,
    ) -> mx.array:
        """Attend; arguments and shapes are those of mlx-lm's function."""
        if hasattr(cache, "attend_blocks") and not unknown:
            output = cache.attend_blocks(queries, keys, values, scale, mask, sinks)
            if output is not None:
                return output
        return self.original(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks, **unknown
        )


class FlatSwiglu(_StandIn):
    """Flat rows give such."""

    original = staticmethod(activations.swiglu)

    def __call__(self, gate: mx.array, x: mx.array) -> mx.array:
        """SiLU of one, times the other."""
        if isinstance(gate, FlatRows) and gate.shape == x.shape:
            return FlatRows(self.original(flat_rows(gate), flat_rows(x)), x.shape)
        return self.original(gate, x)


_STAND_INS = (BlockAttention, FlatSwiglu)


class HookHandle:
    """Keeps the hook in place until ``undo`` or the end of a ``with`` block."""

    def __init__(self, bindings: list[tuple[dict[str, Any], str]]) -> None:
        self._bindings = bindings

    def undo(self) -> None:
        """Give up this use of the hook; the last user's restores mlx-lm's functions. Idempotent."""
        with _LOCK:
            for namespace, name in self._bindings:
                bound = namespace[name]
                bound.num_users -= 1
                if bound.num_users == 0:
                    namespace[name] = bound.original
            self._bindings = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


def install_hook(model: nn.Module) -> HookHandle:
    """Rebind mlx-lm's functions in every module that the model's classes come from.

    Args:
        model: One of mlx-lm's models, or one that uses mlx-lm's attention function. One with
            attention maths of its own, or without any, stays as it is.
    """
    bindings = []
    with _LOCK:
        for namespace in _namespaces(model):
            for name, bound in list(namespace.items()):
                for each in _STAND_INS:
                    if bound is each.original:
                        namespace[name] = bound = each()
                if isinstance(bound, _StandIn):
                    bound.num_users += 1
                    bindings.append((namespace, name))
    return HookHandle(bindings)


def _namespaces(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The global names that the methods of the model's classes see, each namespace once."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    # mlx-lm's own modules keep the originals, so that models imported later find them.
    seen = {id(vars(base)), id(vars(activations))}
    for cls in classes:
        found = [
            member.__globals__ for member in vars(cls).values() if isinstance(member, FunctionType)
        ]
        # Methods may be wrapped (compiled, decorated); the class's own module is known anyway.
        module = sys.modules.get(cls.__module__)
        if module is not None:
            found.append(vars(module))
        for namespace in found:
            if id(namespace) not in seen:
                seen.add(id(namespace))
                yield namespace
