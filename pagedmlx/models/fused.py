"""Joins linear layers that read the same input, so that one product does the work of several.

The model's code stays as it is: where its layers stood, parts stand that share the joined product.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pagedmlx.models.dry_run import distinct_modules, dry_run
from pagedmlx.models.flat_rows import FlatRows, flat_rows
from pagedmlx.models.linear import TransposedLinear

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_CLASSES = (nn.Linear, nn.QuantizedLinear)
_ARRAYS = ("weight", "bias", "scales", "biases")


def fuse_projections(model: nn.Module) -> int:
    """Join q, k and v, and gate and up, wherever a model gives them the same input; in place.

    Only MLX's own ``Linear`` and ``QuantizedLinear`` are joined, and only such of one form and
    type. A dry run, which computes nothing, shows which of them the model calls with the same
    array. What isn't known stays as it is, and so does a model that was here before.

    Args:
        model: One of mlx-lm's models, its weights final and evaluated. Layers are joined one
            after the other, so that the weights of one are the most memory that is taken beside.

    Returns:
        How many products one pass through the model saves.
    """
    candidates = [
        siblings for module in distinct_modules(model) for siblings in _find_siblings(module)
    ]
    num_saved = 0
    for siblings in _with_same_input(model, candidates):
        num_saved += len(siblings.names) - 1
        _join(siblings)
        # The pieces' sizes don't come back, so their memory would lie in MLX's cache for good.
        mx.clear_cache()
    return num_saved


@dataclass(frozen=True, slots=True, eq=False)
class _Siblings:
    """Layers of one module that can be joined."""

    module: nn.Module
    names: tuple[str, ...]

    @property
    def layers(self) -> list[Any]:
        return [self.module[name] for name in self.names]

    def replace(self, layers: Sequence[Any]) -> None:
        for name, layer in zip(self.names, layers, strict=True):
            self.module[name] = layer


def _find_siblings(module: nn.Module) -> Iterator[_Siblings]:
    for names in _SIBLINGS:
        layers = [module.get(name) for name in names]
        if all(type(layer) in _CLASSES for layer in layers):
            first, *others = map(_form, layers)
            if first is not None and all(form == first for form in others):
                yield _Siblings(module, names)


def _form(layer: Any) -> object:
    """What must be equal in layers that are joined; None if something in one isn't known."""
    if not set(_ARRAYS).issuperset(layer):
        return None
    settings = [getattr(layer, name, None) for name in ("group_size", "bits", "mode")]
    return type(layer), settings, {name: (a.dtype, a.shape[1:]) for name, a in layer.items()}


class _Watched:
    """Stands in for a layer during the dry run and notes what it is called with."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        # Kept until the end, so that no later array is taken for an earlier one.
        self.inputs: list[mx.array] = []

    def __call__(self, x: mx.array) -> mx.array:
        self.inputs.append(x)
        return self.layer(x)


def _with_same_input(model: nn.Module, candidates: list[_Siblings]) -> list[_Siblings]:
    """Those whose layers are all called with the very same arrays."""
    with _watching(candidates) as watched:
        if not dry_run(model):
            return []
    return [
        siblings
        for siblings, layers in zip(candidates, watched, strict=True)
        if all(layer.inputs for layer in layers)
        and len({tuple(map(id, layer.inputs)) for layer in layers}) == 1
    ]


@contextmanager
def _watching(candidates: list[_Siblings]) -> Iterator[list[list[_Watched]]]:
    watched = [[_Watched(layer) for layer in siblings.layers] for siblings in candidates]
    try:
        for siblings, layers in zip(candidates, watched, strict=True):
            siblings.replace(layers)
        yield watched
    finally:
        for siblings, layers in zip(candidates, watched, strict=True):
            siblings.replace([each.layer for each in layers])


def _join(siblings: _Siblings) -> None:
    layers = siblings.layers
    ends = list(itertools.accumulate(len(layer["weight"]) for layer in layers))
    arrays = {name: mx.concatenate([layer[name] for layer in layers]) for name in layers[0]}
    mx.eval(arrays)
    if type(layers[0]) is nn.Linear:
        linear = TransposedLinear(**arrays)
    else:
        # A copy of the first has the class and the settings that the joined one needs.
        linear = copy.copy(layers[0])
        linear.update(arrays)
    joined = JoinedLinear(linear, tuple(ends))
    siblings.replace([LinearPart(joined, index) for index in range(len(layers))])


class JoinedLinear(nn.Module):
    """A linear layer whose output is cut along its last axis, a piece for each part.

    The pieces of one input wait until their parts are called with that same array; they are
    dropped when the input is gone, so that a part that is never called keeps nothing alive.

    Args:
        linear: The layer.
        ends: Where each piece ends.
    """

    def __init__(self, linear: nn.Module, ends: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = linear
        self._ends = ends
        self._waiting: _Waiting | None = None

    def piece(self, index: int, x: mx.array) -> mx.array:
        """One piece of the output for ``x``; computes all of them unless they wait already."""
        waiting = self._waiting
        if waiting is None or waiting.input() is not x or index not in waiting.pieces:
            pieces = mx.split(self.linear(flat_rows(x)), list(self._ends[:-1]), axis=-1)
            shaped = (FlatRows(piece, (*x.shape[:-1], piece.shape[-1])) for piece in pieces)
            waiting = _Waiting(weakref.ref(x, self._forget), dict(enumerate(shaped)))
            self._waiting = waiting
        found = waiting.pieces.pop(index)
        if not waiting.pieces:
            self._waiting = None
        return found

    def _forget(self, gone: weakref.ref[mx.array]) -> None:
        if self._waiting is not None and self._waiting.input is gone:
            self._waiting = None

    def array(self, index: int, name: str) -> mx.array:
        """The rows of one of the layer's arrays that belong to a piece."""
        start = self._ends[index - 1] if index else 0
        return self.linear[name][start : self._ends[index]]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """Pieces that have not been asked for yet."""

    input: weakref.ref[mx.array]
    pieces: dict[int, mx.array]


class LinearPart(nn.Module):
    """Stands where one of the joined layers stood; has the same output, and arrays to look at.

    Args:
        joined: Does the work; its parameters are those of the first part, and count once.
        index: Which of the pieces this is.
    """

    def __init__(self, joined: JoinedLinear, index: int) -> None:
        super().__init__()
        self._index = index
        if index == 0:
            self.joined = joined
        else:
            # Past MLX, which would take it for a child.
            object.__setattr__(self, "joined", joined)

    def __call__(self, x: mx.array) -> mx.array:
        """Multiply with this part's weights; (..., input size) to (..., output size)."""
        return self.joined.piece(self._index, x)

    def __getattr__(self, name: str) -> Any:
        """``weight``, ``bias``, ``scales`` and ``biases`` as the layer had them."""
        if name in _ARRAYS and name in self.joined.linear:
            return self.joined.array(self._index, name)
        return super().__getattr__(name)
