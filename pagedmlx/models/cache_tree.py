"""CacheTree: what kinds of layer caches a model makes, and lists of stand-ins in the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class CacheKind:
    """One of a model's layer caches: it keeps all tokens, a window of them, or a state.

    Attributes:
        window: Tokens that a query sees; None is all.
        num_arrays: How many arrays a recurrent state has; 0 for K and V.
    """

    window: int | None = None
    num_arrays: int = 0


@dataclass(frozen=True, slots=True)
class CacheTree:
    """The layer caches of a model, those inside a ``CacheList`` counted one by one.

    Attributes:
        kinds: One entry for each cache.
        sizes: For each entry of the model's own list, how many caches it holds; None for a cache
            that stands by itself.
    """

    kinds: tuple[CacheKind, ...]
    sizes: tuple[int | None, ...]

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Indexes of the caches that hold a recurrent state."""
        return tuple(index for index, each in enumerate(self.kinds) if each.num_arrays)

    def groups(self, layers: Sequence[int]) -> tuple[KVGroup, ...]:
        """Group layers that keep the same span of history, in the order of their first layers.

        Args:
            layers: Those that store K and V. If there are none, blocks still count tokens: one
                group has no layers then.
        """
        members: dict[int | None, list[int]] = {}
        for layer in layers:
            members.setdefault(self.kinds[layer].window, []).append(layer)
        if not members:
            return (KVGroup(KVGroupKind.FULL, ()),)
        return tuple(
            KVGroup(
                KVGroupKind.FULL if window is None else KVGroupKind.WINDOW, tuple(layers), window
            )
            for window, layers in members.items()
        )

    def arrange(self, caches: Sequence[Any]) -> list[Any]:
        """Put one stand-in for each cache into the form of the model's own list."""
        left = iter(caches)
        return [
            next(left) if size is None else CacheList(*(next(left) for _ in range(size)))
            for size in self.sizes
        ]


def read_caches(model: nn.Module, model_type: str) -> CacheTree:
    """Look at the caches that a model makes for itself.

    Args:
        model: One of mlx-lm's.
        model_type: For messages.

    Raises:
        UnsupportedModelError: A cache is of a kind that can't be paged, or there are none.
    """
    kinds: list[CacheKind] = []
    sizes: list[int | None] = []
    for cache in make_prompt_cache(model):
        inner = cache.caches if type(cache) is CacheList else (cache,)
        kinds += [_kind(each, model_type, len(kinds) + at) for at, each in enumerate(inner)]
        sizes.append(len(inner) if type(cache) is CacheList else None)
    if not kinds:
        raise UnsupportedModelError(f"{model_type}: the model has no layer caches")
    return CacheTree(tuple(kinds), tuple(sizes))


def _kind(cache: Any, model_type: str, layer: int) -> CacheKind:
    # By exact type: a subclass may keep something else.
    if type(cache) is KVCache:
        return CacheKind()
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return CacheKind(window=int(cache.max_size))
    if type(cache) is ChunkedKVCache:
        # Before each call it lets go of all but the last ``chunk_size`` tokens.
        return CacheKind(window=int(cache.chunk_size) + 1)
    if type(cache) is ArraysCache:
        return CacheKind(num_arrays=len(cache.cache))
    what = f"a cache of the kind {type(cache).__name__}"
    if type(cache) is RotatingKVCache:
        what = f"its first {cache.keep} tokens and a window (RotatingKVCache)"
    raise UnsupportedModelError(
        f"{model_type}: layer {layer} keeps {what}, which can't be paged",
        hint="run this model with mlx-lm itself",
    )
