"""Finds out how a model must be run and what it stores, by lazy dry runs that compute nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from pagedmlx.core.groups import KVGroup
from pagedmlx.errors import UnsupportedModelError, first_line
from pagedmlx.kv.layout import LayerShape
from pagedmlx.models.cache_tree import CacheKind, CacheTree
from pagedmlx.models.parts import RowLayout
from pagedmlx.models.rows import RowSelection


@dataclass(frozen=True, slots=True)
class ModelSurvey:
    """How a model runs, and what the pool must hold for it.

    Attributes:
        row_layout: The first layout that suits the model.
        reads_gathers: Whether it reads K and V itself instead of leaving them to the blocks.
        mask_ndim: Axes of the masks that it takes for several sequences then.
        groups: Its KV groups, in the order of their first layers.
        layers: What each of its caches stores for one token.
        state_bytes: Recurrent state of one sequence.
        dtype: Type of K and V as the model makes them, by name.
        vocab_size: Logits in a row.
    """

    row_layout: RowLayout
    reads_gathers: bool
    mask_ndim: int
    groups: tuple[KVGroup, ...]
    layers: tuple[LayerShape, ...]
    state_bytes: int
    dtype: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a dry run: S sequences with L tokens, which then have N tokens at most."""

    num_sequences: int
    length: int
    offset: int | tuple[int, ...]
    gathers: bool = False
    mask_ndim: int = 4

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.length + (self.offset if isinstance(self.offset, int) else max(self.offset))


# As many sequences as no model has KV heads, or axes that don't match might pass for such that do.
_CALLS = {
    RowLayout.TOKEN_ROWS: [_Call(2, 1, (0, 1))],
    RowLayout.SEQUENCE_ROWS: [_Call(1, 1, 0), _Call(1, 8, 1), _Call(7, 1, (*range(3, 10),))],
    RowLayout.SINGLE_ROWS: [_Call(1, 8, 0), _Call(1, 1, 8)],
}


# Blocks, or gathered K and V; then the query heads of a KV head may be an axis of their own.
_WAYS = ((False, 4), (True, 4), (True, 5))


@dataclass(slots=True)
class _Findings:
    """What the caches have seen so far."""

    shapes: dict[int, LayerShape] = field(default_factory=dict[int, LayerShape])
    dtypes: dict[int, mx.Dtype] = field(default_factory=dict[int, mx.Dtype])
    states: list[list[mx.array | None]] = field(default_factory=list[list[mx.array | None]])


class WatchedLayer(Protocol):
    """What a layer did in a dry run.

    Attributes:
        stored: The K and V that it has stored.
        queries: The queries that it has attended with.
    """

    stored: list[tuple[mx.array, mx.array]]
    queries: list[mx.array]


class _NotThisWayError(Exception):
    """The model can't run in one of the layouts; says why."""


def survey_model(
    model: nn.Module,
    tree: CacheTree,
    selection: RowSelection,
    model_type: str,
    layouts: Iterable[RowLayout] = tuple(RowLayout),
) -> ModelSurvey:
    """Find the first layout that suits a model, and the shapes of what it stores.

    Args:
        model: With the hook installed.
        tree: The kinds of its caches.
        selection: Of the same model.
        model_type: For messages.
        layouts: Layouts to try, in this order.

    Raises:
        UnsupportedModelError: A use of the caches that can't be paged.
    """
    problem = "no layout of its rows suits it"
    for layout in layouts:
        is_token_rows = layout is RowLayout.TOKEN_ROWS
        if is_token_rows and tree.state_layers:
            continue
        for gathers, mask_ndim in _WAYS[:1] if is_token_rows else _WAYS:
            calls = [replace(call, gathers=gathers, mask_ndim=mask_ndim) for call in _CALLS[layout]]
            try:
                return _try(model, tree, selection, layout, calls)
            except _NotThisWayError as error:
                problem = str(error)
    raise UnsupportedModelError(
        f"{model_type}: {problem}", hint="run this model with mlx-lm itself"
    )


def watch_token_rows(
    model: nn.Module, tree: CacheTree, selection: RowSelection
) -> tuple[list[WatchedLayer], mx.array]:
    """Run a model that goes in token rows once more, dry.

    Attention gives zeros, so the logits depend on no queries, keys or values.

    Args:
        model: With the hook installed.
        tree: The kinds of its caches, none of which keeps a state.
        selection: Of the same model.

    Returns:
        What each layer did, and the logits, not computed yet.
    """
    (call,) = _CALLS[RowLayout.TOKEN_ROWS]
    caches: list[WatchedLayer] = []
    logits = _dry_run(model, tree, selection, call, _Findings(), caches)
    return caches, logits


def _try(
    model: nn.Module,
    tree: CacheTree,
    selection: RowSelection,
    layout: RowLayout,
    calls: list[_Call],
) -> ModelSurvey:
    findings = _Findings()
    logits: Any = None
    for call in calls:
        logits = _dry_run(model, tree, selection, call, findings)
    if not isinstance(logits, mx.array) or logits.ndim != 3 or logits.shape[:2] != (1, 1):
        shape = getattr(logits, "shape", type(logits).__name__)
        raise _NotThisWayError(f"logits for one row have the form {shape}")
    stored = sorted(findings.shapes)
    states = [array for arrays in findings.states for array in arrays if array is not None]
    dtypes = [findings.dtypes[layer] for layer in stored] or [array.dtype for array in states]
    if not dtypes:
        raise _NotThisWayError("no layer stores anything in its cache")
    return ModelSurvey(
        row_layout=layout,
        reads_gathers=calls[0].gathers,
        mask_ndim=calls[0].mask_ndim,
        groups=tree.groups(stored),
        layers=tuple(
            findings.shapes.get(layer, LayerShape(0, 0, 0)) for layer in range(len(tree.kinds))
        ),
        state_bytes=sum(array.nbytes // len(array) for array in states),
        dtype=str(dtypes[0]).removeprefix("mlx.core."),
        vocab_size=logits.shape[-1],
    )


def _dry_run(
    model: nn.Module,
    tree: CacheTree,
    selection: RowSelection,
    call: _Call,
    findings: _Findings,
    watched: list[WatchedLayer] | None = None,
) -> Any:
    masks: dict[CacheKind, dict[int | None, mx.array]] = {kind: {} for kind in tree.kinds}
    caches = [_stand_in(kind, call, masks[kind]) for kind in tree.kinds]
    states = [caches[layer] for layer in tree.state_layers]
    for cache, arrays in zip(states, findings.states, strict=False):
        cache.cache = [
            None if array is None else mx.repeat(array, call.num_sequences, axis=0)
            for array in arrays
        ]
    tokens = mx.zeros((call.num_sequences, call.length), dtype=mx.int32)
    whole_model: Any = model
    try:
        with selection.using(lambda hidden: hidden[:1, -1:]):
            logits = whole_model(tokens, cache=tree.arrange(caches))
    except Exception as error:
        # Anything may come out of model code that meets other arrays than it expects.
        raise _NotThisWayError(
            f"the model can't run over {_words(call)}: {first_line(error)}"
        ) from error
    for layer, cache in enumerate(caches):
        if isinstance(cache, _RecordingCache):
            _note(layer, cache, call, findings)
            if watched is not None:
                watched.append(cache)
    _note_states([cache.cache for cache in states], findings)
    return logits


def _words(call: _Call) -> str:
    if isinstance(call.offset, int):
        return f"{call.length} tokens of one sequence"
    return "a position for each row"


def _note(layer: int, cache: _RecordingCache, call: _Call, findings: _Findings) -> None:
    problem = cache.problem
    if problem is None and cache.shape is not None:
        if not call.gathers and not cache.attended:
            problem = "does its attention by maths of its own"
        elif findings.shapes.setdefault(layer, cache.shape) != cache.shape:
            problem = "stores K and V of changing shapes"
    if problem is not None:
        raise _NotThisWayError(f"layer {layer} {problem}")
    if cache.dtype is not None:
        findings.dtypes[layer] = cache.dtype


def _note_states(found: list[list[mx.array | None]], findings: _Findings) -> None:
    """A state must keep its size, or it couldn't be accounted for."""
    if findings.states:
        for before, after in zip(findings.states, found, strict=True):
            for old, new in zip(before, after, strict=True):
                if (old is None) != (new is None) or (
                    old is not None and new is not None and old.shape[1:] != new.shape[1:]
                ):
                    raise _NotThisWayError("a layer keeps a state that grows with the text")
    findings.states = [[None if array is None else array[:1] for array in row] for row in found]


def stand_ins(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """What a model passes on for K and V in the blocks; no maths of its own takes such shapes."""
    lead = (3, 5, 7, 1)
    return (
        mx.zeros((*lead, keys.shape[3]), keys.dtype),
        mx.zeros((*lead, values.shape[3]), values.dtype),
    )


def _stand_in(kind: CacheKind, call: _Call, masks: dict[int | None, mx.array]) -> Any:
    if kind.num_arrays:
        return ArraysCache(kind.num_arrays)
    return _RecordingCache(kind.window, call, masks)


class _RecordingCache:
    """A layer cache that notes what the model does with it; its group shares the masks."""

    def __init__(self, window: int | None, call: _Call, masks: dict[int | None, mx.array]) -> None:
        self.window = window
        self.call = call
        self.masks = masks
        self.shape: LayerShape | None = None
        self.dtype: mx.Dtype | None = None
        self.attended = False
        self.problem: str | None = None
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.stored: list[tuple[mx.array, mx.array]] = []
        self.queries: list[mx.array] = []
        self._fetched: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> Any:
        added = 0 if self.shape is None else self.call.length
        offset = self.call.offset
        return offset + added if isinstance(offset, int) else mx.array(offset) + added

    @property
    def start_position(self) -> int:
        if not isinstance(self.call.offset, int):
            raise TypeError("a cache in chunks has one position for all rows")
        return 0

    def maybe_trim_front(self) -> None:
        pass

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        call = self.call
        self.stored.append((keys, values))
        if self.shape is not None:
            self.problem = "stores K and V twice in one pass"
        is_right = keys.shape[0] == call.num_sequences and keys.shape[2] == call.length
        if not is_right or keys.shape[:3] != values.shape[:3]:
            self.problem = f"stores K and V of the shapes {keys.shape} and {values.shape}"
        # A cache of keys alone stores them twice: a pool array can't be empty.
        v_head_dim = values.shape[3] or keys.shape[3]
        if values.shape[3] == 0 and call.num_sequences > 1:
            # By these the model chooses what to attend to, counting back from the end.
            self.problem = "keeps keys alone, whose places padding would shift"
        self.shape = LayerShape(keys.shape[1], keys.shape[3], v_head_dim)
        self.dtype = keys.dtype
        self._fetched = stand_ins(keys, values)
        if call.gathers:
            lead = (*keys.shape[:2], call.num_tokens)
            self._fetched = (
                mx.zeros((*lead, keys.shape[3]), keys.dtype),
                mx.zeros((*lead, values.shape[3]), values.dtype),
            )
        self.keys, self.values = self._fetched
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self._fetched is not None
        return self._fetched

    def attend_blocks(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array | None:
        if self._fetched is None or keys is not self._fetched[0] or values is not self._fetched[1]:
            return None
        if mask is not None and mask is not self.masks.get(None):
            return None
        self.attended = True
        self.queries.append(queries)
        assert self.shape is not None
        return mx.zeros((*queries.shape[:3], self.shape.v_head_dim), dtype=queries.dtype)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        call, window = self.call, self.window
        narrows = window is None or (window_size is not None and window_size < window)
        if window_size not in (None, window) and not (call.gathers and narrows):
            self.problem = f"masks to a window of {window_size}, but keeps {window or 'all'}"
        shape: tuple[int, ...] = (call.num_sequences, 1, 1, 1)
        if call.gathers:
            shape = (call.length, call.num_tokens)
            if call.num_sequences > 1:
                shape = (call.num_sequences, *(1,) * (call.mask_ndim - 3), *shape)
        elif not return_array:
            return None
        # A narrower window than the cache's is another mask.
        key = window_size if call.gathers and window_size != window else None
        return self.masks.setdefault(key, mx.ones(shape, dtype=mx.bool_))
