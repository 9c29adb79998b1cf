"""Leaves the rotation of queries and keys to the kernel that writes K and V.

While a call of a model lasts, stand-ins take the place of its rope modules. They give back what
they are given, and note it; a layer cache that then gets those very arrays has them rotated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils

from pagedmlx.errors import UnsupportedModelError
from pagedmlx.kv.writer import Rope
from pagedmlx.models.cache_tree import CacheTree
from pagedmlx.models.rows import RowSelection
from pagedmlx.models.survey import WatchedLayer, watch_token_rows

_WITH_FREQS = (rope_utils.Llama3RoPE, rope_utils.ProportionalRoPE, rope_utils.YarnRoPE)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a model keeps a rope module."""

    module: nn.Module
    name: str
    original: Any
    rope: Rope


class DeferredRopes:
    """The rope modules of a model whose work can be left to the cache.

    Args:
        places: Where they are.
    """

    def __init__(self, places: Sequence[_Place] = ()) -> None:
        self._places = places
        self._offset: Any = None
        # By identity; the arrays are kept, so that no later one is taken for one of them.
        self._given: dict[int, tuple[mx.array, Rope]] = {}

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def using(self, offset: Any) -> Iterator[None]:
        """Rotate nothing within the block that is to be rotated by this very offset.

        Raises:
            UnsupportedModelError: Something that was not rotated was taken by no cache.
        """
        self._offset = offset
        # Made anew each time: kept, they and this would hold each other, and with them the model.
        stand_ins = [_StandIn(self, place) for place in self._places]
        try:
            with _replaced(self._places, stand_ins):
                yield
            if self._given:
                raise not_rotated()
        finally:
            self._offset = None
            self._given.clear()

    def give(self, x: mx.array, offset: Any, rope: Rope) -> bool:
        """Note that ``x`` is to be rotated later; false if it must be rotated now."""
        if self._offset is None or offset is not self._offset:
            return False
        self._given[id(x)] = x, rope
        return True

    def take(self, array: mx.array) -> Rope | None:
        """How an array must be rotated by who takes it; None if it isn't waiting for that."""
        found = self._given.pop(id(array), None)
        return None if found is None else found[1]


def not_rotated() -> UnsupportedModelError:
    """What a model is refused with that does something else with what its rope modules give."""
    return UnsupportedModelError(
        "queries or keys were to be rotated where K and V are written, and did not get there",
        hint="run this model with mlx-lm itself, and please report it",
    )


class _StandIn:
    """Stands in for a rope module during a call of the model."""

    def __init__(self, ropes: DeferredRopes, place: _Place) -> None:
        self._ropes = ropes
        self._place = place

    def __call__(self, x: mx.array, offset: Any = 0, **others: Any) -> mx.array:
        if not others and self._ropes.give(x, offset, self._place.rope):
            return x
        return self._place.original(x, offset=offset, **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place.original, name)


class _Watched:
    """Stands in for a rope module in a dry run; what it gives is NaN, wherever that goes."""

    def __init__(self) -> None:
        self.got: list[mx.array] = []
        self.given: list[mx.array] = []

    def __call__(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        self.got.append(x)
        self.given.append(mx.full(x.shape, float("nan"), x.dtype))
        return self.given[-1]


def find_deferrable_ropes(
    model: nn.Module, tree: CacheTree, selection: RowSelection
) -> DeferredRopes:
    """Find the rope modules whose results go to a cache and its attention, and nowhere else.

    A dry run shows where they go; another one, which is computed, that nothing depends on them.

    Args:
        model: One that runs in token rows, with the hook installed.
        tree: The kinds of its caches.
        selection: Of the same model.
    """
    found: list[_Place] = []
    try:
        layers, watched, _ = _watch(model, tree, selection, list(_known_places(model)))
        found = [place for place, each in watched if _goes_to_caches(each, place.rope, layers)]
        if found:
            _, _, logits = _watch(model, tree, selection, found)
            if mx.isnan(logits).any().item():
                found = []
    except Exception:
        # Anything may come out of model code; without stand-ins it has run before.
        found = []
    return DeferredRopes(found)


def _watch(
    model: nn.Module, tree: CacheTree, selection: RowSelection, places: list[_Place]
) -> tuple[list[WatchedLayer], list[tuple[_Place, _Watched]], mx.array]:
    watched = [_Watched() for _ in places]
    with _replaced(places, watched):
        layers, logits = watch_token_rows(model, tree, selection)
    return layers, list(zip(places, watched, strict=True)), logits


def _goes_to_caches(watched: _Watched, rope: Rope, layers: list[WatchedLayer]) -> bool:
    """Whether all that a rope module gave are the keys and the queries of some layers."""
    given = {id(array) for array in watched.given}
    if len({id(array) for array in watched.got}) < len(given):
        return False  # a stand-in gives what it got, so the two could not be told apart
    taken: set[int] = set()
    for layer in layers:
        if len(layer.stored) != 1 or len(layer.queries) != 1:
            continue
        (queries,), ((keys, values),) = layer.queries, layer.stored
        if {id(queries), id(keys)} <= given and _can_rotate(rope, queries, keys, values):
            taken |= {id(queries), id(keys)}
    return bool(given) and taken == given


def _can_rotate(rope: Rope, queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernel takes such rows."""
    dims = (keys.shape[3], values.shape[3])
    return (
        queries is not keys
        and queries.dtype == keys.dtype == values.dtype
        and queries.shape[3] == keys.shape[3] >= rope.dims
        and queries.shape[1] % keys.shape[1] == 0
        and all(dim > 0 and dim % 4 == 0 for dim in dims)
    )


def _known_places(model: nn.Module) -> Iterator[_Place]:
    """Rope modules that are known; those that rotate alike have one rope, for layers to share."""
    ropes: list[Rope] = []
    for module in {id(module): module for module in model.modules()}.values():
        for name, child in module.items():
            rope = read_rope(child)
            if rope is not None:
                yield _Place(module, name, child, _one_among(ropes, rope))


def _one_among(ropes: list[Rope], rope: Rope) -> Rope:
    """The one that rotates like this one, which joins them if there is none."""
    for each in ropes:
        if each == rope and _are_equal(each.freqs, rope.freqs):
            return each
    ropes.append(rope)
    return rope


def _are_equal(one: mx.array | None, other: mx.array | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(mx.array_equal(one, other).item())


def read_rope(module: Any) -> Rope | None:
    """What a rope module does, if it is one call of ``mx.fast.rope`` and nothing else."""
    kind = type(module)
    if kind is nn.RoPE:
        rope = Rope(module.dims, bool(module.traditional), float(module.base), float(module.scale))
    elif kind in _WITH_FREQS and getattr(module, "mscale", 1.0) == 1.0:
        freqs = module._freqs
        if freqs.dtype != mx.float32 or freqs.shape != (module.dims // 2,):
            return None
        rope = Rope(module.dims, bool(module.traditional), None, 1.0, freqs)
    else:
        return None
    return rope if rope.dims > 0 and rope.dims % 2 == 0 else None


@contextmanager
def _replaced(places: Sequence[_Place], stand_ins: Sequence[Any]) -> Iterator[None]:
    try:
        for place, stand_in in zip(places, stand_ins, strict=True):
            place.module[place.name] = stand_in
        yield
    finally:
        for place in places:
            place.module[place.name] = place.original
