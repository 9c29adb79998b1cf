"""The production path of the CPU: gather the blocks that a row sees, then MLX's own attention.

All single-row sequences go together, each prefill chunk goes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.core.batch import BatchArrays, Int32Array
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import AttentionParams, GroupBatch, PagedBatch
from pagedmlx.ops.reference import explicit_attention, visible

MAX_PADDING = 256
"""Padded tokens that cost less to read than one more launch does."""


class GatherBackend:
    """Attends through gathered copies of the blocks; what to gather is planned once a step."""

    name = "gather"
    takes_padding = False

    def __init__(self) -> None:
        self._batch: PagedBatch | None = None
        self._plans: dict[tuple[int, int | None], _Plan] = {}

    def attend(
        self,
        queries: mx.array,
        layer: int,
        group: int,
        store: KVStore,
        batch: PagedBatch,
        params: AttentionParams,
    ) -> mx.array:
        """See ``AttentionBackend.attend``."""
        plan = self._plan(batch, group, params.window, store.layout.block_size)
        if plan.order is not None:
            queries = queries[plan.order]
        outputs = [
            attend_gathered(
                queries[part.rows],
                *part.read(store, layer, batch.groups[group]),
                part.mask,
                part.seen,
                params,
            )
            for part in plan.parts
        ]
        output = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return output if plan.inverse is None else output[plan.inverse]

    def rest(self) -> None:
        """See ``AttentionBackend.rest``."""
        self._batch, self._plans = None, {}

    def _plan(self, batch: PagedBatch, group: int, window: int | None, block_size: int) -> _Plan:
        if self._batch is not batch:
            self._batch, self._plans = batch, {}
        key = (group, window)
        if key not in self._plans:
            self._plans[key] = _make_plan(batch.host, group, window, block_size)
        return self._plans[key]


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one row each.

    Attributes:
        rows: Their rows, in the plan's order.
        slots: (S, N) int64; what is past a sequence's end names its last token's slot, so that
            no slot is read that holds no live token: a masked NaN would still poison the row.
        seen: (S, 1, 1, N) booleans, false for what is past the end.
        mask: ``seen`` where it matters, in the cheapest form that MLX's attention takes.
    """

    rows: slice
    slots: mx.array
    seen: mx.array
    mask: mx.array | None

    def read(self, store: KVStore, layer: int, group: GroupBatch) -> tuple[mx.array, mx.array]:
        return store.gather_slots(layer, self.slots)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence with many rows.

    Attributes:
        rows: Its rows.
        block_tables: (1, B) int32; from the first block that a row sees.
        tokens: The tokens of those blocks that a row sees.
        seen: (L, N) booleans.
        mask: ``seen`` in the cheapest form that MLX's attention takes.
        is_whole: Whether its rows are the whole sequence.
    """

    rows: slice
    block_tables: mx.array
    tokens: slice
    seen: mx.array
    mask: mx.array | str
    is_whole: bool

    def read(self, store: KVStore, layer: int, group: GroupBatch) -> tuple[mx.array, mx.array]:
        own = own_rows(store, layer, group, self.rows) if self.is_whole else None
        if own is not None:
            return own
        keys, values = store.gather(layer, self.block_tables)
        return keys[:, :, self.tokens], values[:, :, self.tokens]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to gather for one KV group and window; ``order`` sorts the rows by part."""

    parts: tuple[_Decodes | _Chunk, ...]
    order: mx.array | None
    inverse: mx.array | None


def _make_plan(host: BatchArrays, group: int, window: int | None, block_size: int) -> _Plan:
    tables, ends, starts = host.groups[group].block_tables, host.context_lens, host.query_start_loc
    # The rows of a sequence compute its tokens [firsts, ends) and see its tokens [lows, ends).
    firsts = ends - np.diff(starts)
    lows = np.zeros_like(ends) if window is None else np.maximum(firsts - window + 1, 0)

    parts: list[_Decodes | _Chunk] = []
    order = np.arange(host.num_rows)
    row = 0
    buckets = split_by_length((ends - lows)[: host.num_decodes], MAX_PADDING)
    for bucket in buckets:
        rows = slice(row, row + len(bucket))
        parts.append(_decodes(rows, tables[bucket], lows[bucket], ends[bucket], block_size))
        order[rows] = bucket
        row = rows.stop
    for index in range(host.num_decodes, len(ends)):
        low, end = int(lows[index]), int(ends[index])
        block = low // block_size
        seen = visible(mx.arange(int(firsts[index]), end), mx.arange(low, end), window)
        parts.append(
            _Chunk(
                rows=slice(int(starts[index]), int(starts[index + 1])),
                block_tables=mx.array(tables[index, None, block : -(-end // block_size)]),
                tokens=slice(low - block * block_size, end - block * block_size),
                seen=seen,
                mask="causal" if window is None or end <= window else seen,
                is_whole=int(firsts[index]) == 0,
            )
        )
    if len(buckets) <= 1:
        return _Plan(tuple(parts), None, None)
    return _Plan(tuple(parts), mx.array(order), mx.array(np.argsort(order)))


def _decodes(
    rows: slice, tables: Int32Array, lows: Int32Array, ends: Int32Array, block_size: int
) -> _Decodes:
    lengths = ends - lows
    tokens = np.minimum(lows[:, None] + np.arange(lengths.max()), ends[:, None] - 1)
    blocks = np.take_along_axis(tables, tokens // block_size, axis=1).astype(np.int64)
    seen = mx.arange(tokens.shape[1]) < mx.array(lengths)[:, None]
    seen = seen[:, None, None, :]
    return _Decodes(
        rows=rows,
        slots=mx.array(blocks * block_size + tokens % block_size),
        seen=seen,
        mask=None if lengths.min() == lengths.max() else seen,
    )


def split_by_length(lengths: Int32Array, max_padding: int) -> list[npt.NDArray[np.intp]]:
    """Split sequences into buckets, the longest first, each to be padded to its longest.

    Args:
        lengths: Tokens that each sequence reads.
        max_padding: Most padded tokens in a bucket.

    Returns:
        Ascending indexes into ``lengths`` for each bucket; every index once.
    """
    order = np.argsort(-lengths, kind="stable")
    buckets: list[list[int]] = []
    longest = padding = 0
    for index in order.tolist():
        length = int(lengths[index])
        padding += longest - length
        if not buckets or padding > max_padding:
            buckets.append([])
            longest, padding = length, 0
        buckets[-1].append(index)
    return [np.sort(bucket) for bucket in buckets]


def own_rows(
    store: KVStore, layer: int, group: GroupBatch, rows: slice
) -> tuple[mx.array, mx.array] | None:
    """K and V of some rows of the step as the model computed them; nothing is read.

    Args:
        store: Owner of the pool.
        layer: The layer.
        group: The layer's KV group in this step.
        rows: Which of the step's rows.

    Returns:
        K (1, num_kv_heads, L, k_head_dim) and V likewise; None if the store has them no more.
    """
    newest = store.newest(layer, group.slot_mapping)
    if newest is None:
        return None
    keys, values = (array[rows].swapaxes(0, 1)[None] for array in newest)
    return keys, values


def attend_gathered(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | str | None,
    seen: mx.array,
    params: AttentionParams,
) -> mx.array:
    """Attention over gathered K and V, by MLX's own kernel where it can.

    Args:
        queries: (S * L, num_heads, k_head_dim); the rows of S sequences with L rows each.
        keys: (S, num_kv_heads, N, k_head_dim).
        values: (S, num_kv_heads, N, v_head_dim).
        mask: ``seen`` in the cheapest form that MLX's attention takes.
        seen: Booleans that broadcast to (S, 1, L, N).
        params: The layer's settings.

    Returns:
        (S * L, num_heads, v_head_dim) in the type of ``queries``.
    """
    num_seqs, num_kv_heads = keys.shape[:2]
    num_rows, num_heads, head_dim = queries.shape
    shaped = queries.reshape(num_seqs, -1, num_heads, head_dim).swapaxes(1, 2)
    if params.softcap is not None:
        output = explicit_attention(shaped, keys, values, seen, params)
    else:
        sinks = params.sinks
        if sinks is None and num_rows == num_seqs:
            # The query heads of a KV head become rows of one product, which reads K and V once.
            shaped = shaped.reshape(num_seqs, num_kv_heads, -1, head_dim)
        output = mx.fast.scaled_dot_product_attention(
            shaped,
            keys,
            values,
            scale=params.scale,
            mask=mask,
            sinks=None if sinks is None else sinks.astype(queries.dtype),
        )
        output = output.reshape(num_seqs, num_heads, -1, output.shape[-1])
    return output.swapaxes(1, 2).reshape(num_rows, num_heads, -1).astype(queries.dtype)
