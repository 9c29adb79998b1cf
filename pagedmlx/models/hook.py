"""Sends the attention of an mlx-lm model to the blocks, without touching the model's code.

mlx-lm's models import one function, ``scaled_dot_product_attention``; every name that a model's
modules bind to it is rebound here, and bound back when the last user is gone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FunctionType, TracebackType
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

_ORIGINAL = base.scaled_dot_product_attention
# Engines of one process may install and undo on their own threads.
_LOCK = threading.Lock()


class BlockAttention:
    """Stands in for mlx-lm's function under one name of one module.

    A layer cache of ours takes the call when it can (``attend_blocks``); what it can't take, and
    every call with another cache, goes to mlx-lm's function on the arrays that were passed.
    """

    def __init__(self) -> None:
        self.num_users = 0

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
        return _ORIGINAL(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks, **unknown
        )


class HookHandle:
    """Keeps the hook in place until ``undo`` or the end of a ``with`` block."""

    def __init__(self, bindings: list[tuple[dict[str, Any], str]]) -> None:
        self._bindings = bindings

    def undo(self) -> None:
        """Give up this use of the hook; the last user's restores mlx-lm's function. Idempotent."""
        with _LOCK:
            for namespace, name in self._bindings:
                bound = namespace[name]
                bound.num_users -= 1
                if bound.num_users == 0:
                    namespace[name] = _ORIGINAL
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
    """Rebind mlx-lm's attention function in every module that the model's classes come from.

    Args:
        model: One of mlx-lm's models, or one that uses mlx-lm's attention function. One with
            attention maths of its own, or without any, stays as it is.
    """
    bindings = []
    with _LOCK:
        for namespace in _namespaces(model):
            for name, bound in list(namespace.items()):
                if bound is _ORIGINAL:
                    namespace[name] = bound = BlockAttention()
                if isinstance(bound, BlockAttention):
                    bound.num_users += 1
                    bindings.append((namespace, name))
    return HookHandle(bindings)


def _namespaces(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The global names that the methods of the model's classes see, each namespace once."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    # mlx-lm's base module keeps the original, so that models imported later find it.
    seen = {id(vars(base))}
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
