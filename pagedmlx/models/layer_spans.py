"""LayerSpans: passes through a model in which only some of its layers compute anything.

MLX goes through a whole graph before the device sees any of it. Cut in spans of layers, the device
computes one span while MLX goes through the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import NoneType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pagedmlx.models.dry_run import dry_run, lazy_logits

FIRST_SPAN = 2
"""Layers of the first span; each further one has half as many again. On an H200 the host takes more
than half of the time for a layer that the device does, so that longer ones would come too late."""

LONGEST_SPAN = 4
"""On a busy host the device waits for the last span, and then all of that is left to compute."""


class LayerSpans:
    """The spans of a model, and what it takes to run one of them.

    While a span runs, stand-ins are in the model's own list of layers: no other thread may use it.

    Args:
        layers: As ``layers_in_a_chain`` gives them; without any there are no spans.

    Attributes:
        whole: All layers.
        parts: Spans that follow each other and are all layers together.
    """

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        self.whole = range(len(layers))
        self.parts = tuple(_cut(len(layers))) or (self.whole,)

    def run(self, span: range, hidden: mx.array, call: Callable[[], mx.array]) -> mx.array:
        """Call the model, all layers but those of a span being skipped.

        Args:
            span: One of ``parts``, or ``whole``.
            hidden: What the layers before the span have come to, if there are any.
            call: Calls the model and returns its logits.

        Returns:
            What the span's last layer gives; after the last span the logits.
        """
        passed: list[mx.array] = []

        def begin(*_: Any, **__: Any) -> mx.array:
            return hidden

        def end(x: mx.array, *_: Any, **__: Any) -> mx.array:
            passed.append(x.reshape(x.shape))  # the model may change its own object in place
            return x

        with ExitStack() as undo:
            for index in self.whole:
                if index not in span:
                    skip = begin if index < span.start else end
                    undo.callback(_replace(self._layers, index, skip))
            logits = call()
        # What the rest of the model makes of what was passed is never computed.
        return logits if span.stop == len(self._layers) else passed[0]


def layers_in_a_chain(model: nn.Module) -> list[Any]:
    """Find the layers of a model whose code passes one array from each to the next, no more.

    Then this array is all that a layer, or what follows the last one, must know of those before,
    besides the token ids. A dry run shows that.

    Args:
        model: One of mlx-lm's models.

    Returns:
        The list that the model goes through; empty if it isn't such a model.
    """
    layers = _list_of_layers(model)
    calls: list[_Call] = []

    def watched(layer: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            output = layer(*args, **kwargs)
            calls.append(
                _Call(layer, args[0] if args else None, [*args[1:], *kwargs.values()], output)
            )
            return output

        return call

    with ExitStack() as undo:
        for index, layer in enumerate(layers):
            undo.callback(_replace(layers, index, watched(layer)))
        if not dry_run(model):
            return []
    return layers if _is_chain(layers, calls) and _only_last_matters(model, layers) else []


class _StandIn:
    """Something else to call in place of a layer, which otherwise is as it was."""

    def __init__(self, layer: Any, function: Callable[..., mx.array]) -> None:
        self._layer = layer
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What a model looks at besides, such as the kind of a layer."""
        return getattr(self._layer, name)


def _replace(
    layers: list[Any], index: int, function: Callable[..., mx.array]
) -> Callable[[], None]:
    """Put a stand-in where a layer is; returns what undoes that."""
    layer = layers[index]
    layers[index] = _StandIn(layer, function)
    return lambda: layers.__setitem__(index, layer)


def _cut(num_layers: int) -> Iterator[range]:
    start, size = 0, FIRST_SPAN
    while start < num_layers:
        # Few layers that are left are no span of their own.
        stop = start + size if num_layers - start > size + size // 2 else num_layers
        yield range(start, stop)
        start, size = stop, min(size + (size + 1) // 2, LONGEST_SPAN)


def _list_of_layers(model: nn.Module) -> list[Any]:
    """The list itself; what a model gives as its layers may be a copy."""
    given = [id(layer) for layer in getattr(model, "layers", None) or ()]
    for module in model.modules():
        for child in module.values():
            if isinstance(child, list) and [id(layer) for layer in child] == given:
                return child
    return []


@dataclass(frozen=True, slots=True)
class _Call:
    """Of a layer: its first argument, the other ones, and what it gave."""

    layer: Any
    x: Any
    others: list[Any]
    output: Any


def _only_last_matters(model: nn.Module, layers: list[Any]) -> bool:
    """Whether each layer gets just what the one before gives, and logits come of the last one's.

    Layers are replaced by constants, once by these and once by others: an array that the model
    changes in place, and results that it keeps aside, would show.
    """
    last, checks = len(layers) - 1, list[mx.array]()

    def logits_of(sign: float) -> mx.array | None:
        def constant(x: mx.array, *_: Any, index: int, **__: Any) -> mx.array:
            if index:
                checks.append((x == sign * index).all())
            return mx.full(x.shape, 1.0 if index == last else sign * (index + 1), x.dtype)

        with ExitStack() as undo:
            for index in range(len(layers)):
                undo.callback(_replace(layers, index, partial(constant, index=index)))
            return lazy_logits(model, mx.zeros(1, mx.int32))

    first, second = logits_of(1.0), logits_of(-1.0)
    if first is None or second is None:
        return False
    return all(each.item() for each in [*checks, mx.array_equal(first, second, equal_nan=True)])


def _is_chain(layers: list[Any], calls: list[_Call]) -> bool:
    """Whether each layer is called once, in turn, on what the one before gave, and no more."""
    if not calls or [id(call.layer) for call in calls] != [id(layer) for layer in layers]:
        return False
    if not all(isinstance(call.output, mx.array) for call in calls):
        return False
    if any(after.x is not before.output for before, after in pairwise(calls)):
        return False
    # What the first layer is given too isn't the result of any.
    shared = {id(other) for other in calls[0].others if isinstance(other, mx.array)}
    owned = set[int]()
    for call in calls:
        for other in call.others:
            if isinstance(other, (str, int, float, NoneType)) or id(other) in shared:
                continue
            # A cache, which one layer fills and no other one looks at.
            if isinstance(other, (mx.array, tuple, list, dict)) or id(other) in owned:
                return False
            owned.add(id(other))
    return True
