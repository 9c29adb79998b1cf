"""Finds out what a model stores per layer, by one lazy dry run that computes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.errors import UnsupportedModelError, first_line
from pagedmlx.kv.layout import LayerShape
from pagedmlx.models.rows import RowSelection

_NUM_ROWS = 2


@dataclass(frozen=True, slots=True)
class ModelSurvey:
    """What the pool must hold for a model.

    Attributes:
        groups: The model's KV groups, in the order of their first layers.
        layers: What each layer stores for one token.
        dtype: Type of K and V as the model makes them, by name.
        vocab_size: Logits in a row.
    """

    groups: tuple[KVGroup, ...]
    layers: tuple[LayerShape, ...]
    dtype: str
    vocab_size: int


def survey_model(
    model: nn.Module, groups: tuple[KVGroup, ...], selection: RowSelection, model_type: str
) -> ModelSurvey:
    """Read the shapes of a model's K and V from a dry run of a few rows.

    Args:
        model: With the hook installed.
        groups: From ``find_groups``.
        selection: Of the same model.
        model_type: For messages.

    Raises:
        UnsupportedModelError: A use of the caches that can't be paged.
    """
    windows = {layer: group.window for group in groups for layer in group.layers}
    caches = [_RecordingCache(windows[layer]) for layer in range(len(windows))]
    tokens = mx.zeros((_NUM_ROWS, 1), dtype=mx.int32)
    whole_model: Any = model
    try:
        with selection.using(lambda hidden: hidden[mx.array([_NUM_ROWS - 1])]):
            logits = whole_model(tokens, cache=caches)
    except Exception as error:
        # Anything may come out of model code that meets an offset for each row.
        reason = first_line(error)
        raise UnsupportedModelError(
            f"{model_type}: the model can't run with a position for each row: {reason}"
        ) from error
    for layer, cache in enumerate(caches):
        if cache.problem is not None or cache.shape is None or not cache.attended:
            problem = cache.problem or (
                "stores no K and V"
                if cache.shape is None
                else "does its attention by maths of its own"
            )
            raise UnsupportedModelError(
                f"{model_type}: layer {layer} {problem}, which can't be paged yet",
                hint="run this model with mlx-lm itself",
            )
    if not isinstance(logits, mx.array) or logits.ndim != 3 or logits.shape[:2] != (1, 1):
        shape = getattr(logits, "shape", type(logits).__name__)
        raise UnsupportedModelError(f"{model_type}: logits for one row have the form {shape}")
    return ModelSurvey(
        groups=groups,
        layers=tuple(cache.shape for cache in caches if cache.shape is not None),
        dtype=str(caches[0].dtype).removeprefix("mlx.core."),
        vocab_size=logits.shape[-1],
    )


def find_groups(model: nn.Module, model_type: str) -> tuple[KVGroup, ...]:
    """Group layers by the kind of cache that the model makes for them.

    Args:
        model: One of mlx-lm's.
        model_type: For messages.

    Raises:
        UnsupportedModelError: A cache is neither a plain nor a rotating KV cache.
    """
    members: dict[int | None, list[int]] = {}
    for layer, cache in enumerate(make_prompt_cache(model)):
        # By exact type: a subclass may keep something else.
        if type(cache) is KVCache:
            window = None
        elif type(cache) is RotatingKVCache and cache.keep == 0:
            window = int(cache.max_size)
        else:
            raise UnsupportedModelError(
                f"{model_type}: layer {layer} keeps {_describe(cache)}, which isn't served yet "
                "(it needs sequence rows)",
                hint="run this model with mlx-lm itself",
            )
        members.setdefault(window, []).append(layer)
    if not members:
        raise UnsupportedModelError(f"{model_type}: the model has no layer caches")
    return tuple(
        KVGroup(
            kind=KVGroupKind.FULL if window is None else KVGroupKind.WINDOW,
            layers=tuple(layers),
            window=window,
        )
        for window, layers in members.items()
    )


def _describe(cache: Any) -> str:
    if type(cache) is RotatingKVCache:
        return f"its first {cache.keep} tokens and a window (RotatingKVCache)"
    return f"a cache of the kind {type(cache).__name__}"


class _RecordingCache:
    """A layer cache that notes what the model does with it and hands its input back."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.offset = mx.arange(_NUM_ROWS, dtype=mx.int32)
        self.shape: LayerShape | None = None
        self.dtype: mx.Dtype | None = None
        self.attended = False
        self.problem: str | None = None
        self._fetched: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.shape is not None:
            self.problem = "stores K and V twice in one pass"
        if keys.shape[0] != _NUM_ROWS or keys.shape[2] != 1 or keys.shape[:3] != values.shape[:3]:
            self.problem = f"stores K and V of the shapes {keys.shape} and {values.shape}"
        self.shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3])
        self.dtype = keys.dtype
        self._fetched = (keys, values)
        return self._fetched

    def attend_blocks(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array | None:
        if self._fetched is None or keys is not self._fetched[0] or values is not self._fetched[1]:
            return None
        self.attended = True
        return mx.zeros((*queries.shape[:3], values.shape[3]), dtype=queries.dtype)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        if window_size is not None and window_size != self.window:
            self.problem = f"masks to a window of {window_size}, but keeps {self.window or 'all'}"
        return mx.ones((_NUM_ROWS, 1, 1, 1), dtype=mx.bool_) if return_array else None
