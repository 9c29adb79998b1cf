"""The production path of the CPU: gather the blocks that a row sees, then MLX's own attention.

All single-row sequences go together, each prefill chunk goes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.core.batch import BatchArrays
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import AttentionParams, PagedBatch
from pagedmlx.ops.reference import explicit_attention, visible

MAX_PADDING = 512
"""Padded tokens per launch of single-row sequences; to read more costs more than a launch."""


class GatherBackend:
    """Attends through gathered copies of the blocks; what to gather is planned once a step."""

    name = "gather"

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
        outputs = [_attend(queries[part.rows], layer, store, part, params) for part in plan.parts]
        output = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return output if plan.inverse is None else output[plan.inverse]

    def _plan(self, batch: PagedBatch, group: int, window: int | None, block_size: int) -> _Plan:
        if self._batch is not batch:
            self._batch, self._plans = batch, {}
        key = (group, window)
        if key not in self._plans:
            self._plans[key] = _make_plan(batch.host, group, window, block_size)
        return self._plans[key]


@dataclass(frozen=True, slots=True)
class _Part:
    """Sequences that are attended together: any number with one row each, or one with many.

    Attributes:
        rows: Their rows, in the plan's order.
        block_tables: (S, B) int32; from the first block that a row sees.
        tokens: The gathered tokens that are kept.
        dead: (sequences, tokens) indexes of kept tokens that no row sees; None if there are none.
        seen: Booleans that broadcast to (S, 1, L, N).
        mask: The same for MLX's attention, in the cheapest form that it takes.
    """

    rows: slice
    block_tables: mx.array
    tokens: slice
    dead: tuple[mx.array, mx.array] | None
    seen: mx.array
    mask: mx.array | str | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to gather for one KV group and window; ``order`` sorts the rows by part."""

    parts: tuple[_Part, ...]
    order: mx.array | None
    inverse: mx.array | None


def _make_plan(host: BatchArrays, group: int, window: int | None, block_size: int) -> _Plan:
    tables, ends, starts = host.groups[group].block_tables, host.context_lens, host.query_start_loc
    # Each sequence's rows see tokens [lows, ends), which are in blocks [firsts, lasts).
    first_positions = ends - np.diff(starts)
    lows = np.zeros_like(ends) if window is None else np.maximum(first_positions - window + 1, 0)
    firsts, lasts = lows // block_size, -(-ends // block_size)

    parts: list[_Part] = []
    order = np.arange(host.num_rows)
    num_decodes = host.num_decodes
    buckets = split_by_width((lasts - firsts)[:num_decodes], MAX_PADDING // block_size)
    for bucket in buckets:
        width = int((lasts - firsts)[bucket].max())
        blocks = firsts[bucket, None] + np.arange(width)
        inside = blocks < lasts[bucket, None]
        # Any valid id will do past the end: those tokens are dead.
        blocks = np.where(inside, tables[bucket[:, None], np.where(inside, blocks, 0)], 0)
        tokens = firsts[bucket, None] * block_size + np.arange(width * block_size)
        live = (tokens >= lows[bucket, None]) & (tokens < ends[bucket, None])
        row = parts[-1].rows.stop if parts else 0
        parts.append(_decode_part(slice(row, row + len(bucket)), blocks, live))
    if len(buckets) > 1:
        order[:num_decodes] = np.concatenate(buckets)

    for index in range(num_decodes, len(ends)):
        first, low, end = int(firsts[index]), int(lows[index]), int(ends[index])
        seen = visible(mx.arange(int(first_positions[index]), end), mx.arange(low, end), window)
        parts.append(
            _Part(
                rows=slice(int(starts[index]), int(starts[index + 1])),
                block_tables=mx.array(tables[index, None, first : lasts[index]]),
                tokens=slice(low - first * block_size, end - first * block_size),
                dead=None,
                seen=seen,
                mask="causal" if window is None or end <= window else seen,
            )
        )
    if len(buckets) <= 1:
        return _Plan(tuple(parts), None, None)
    return _Plan(tuple(parts), mx.array(order), mx.array(np.argsort(order)))


def _decode_part(rows: slice, blocks: npt.NDArray[np.int32], live: npt.NDArray[Any]) -> _Part:
    seen = mx.array(live)[:, None, None, :]
    sequences, tokens = np.nonzero(~live)
    dead = (mx.array(sequences), mx.array(tokens)) if len(tokens) else None
    return _Part(
        rows=rows,
        block_tables=mx.array(blocks),
        tokens=slice(None),
        dead=dead,
        seen=seen,
        mask=None if dead is None else seen,
    )


def split_by_width(widths: npt.NDArray[np.int32], max_padding: int) -> list[npt.NDArray[np.intp]]:
    """Split sequences, longest first; no bucket pads by more than ``max_padding`` blocks."""
    order = np.argsort(-widths, kind="stable")
    edges, padding = [0], 0
    for position, width in enumerate(widths[order]):
        padding += int(widths[order[edges[-1]]] - width)
        if padding > max_padding:
            edges.append(position)
            padding = 0
    return [np.sort(order[low:high]) for low, high in pairwise([*edges, len(order)]) if low < high]


def _attend(
    queries: mx.array, layer: int, store: KVStore, part: _Part, params: AttentionParams
) -> mx.array:
    keys, values = store.gather(layer, part.block_tables)
    keys, values = keys[:, :, part.tokens], values[:, :, part.tokens]
    if part.dead is not None:
        # A masked NaN would still reach the output: its weight is 0, and 0 * NaN is NaN.
        sequences, tokens = part.dead
        keys[sequences, :, tokens] = 0
        values[sequences, :, tokens] = 0
    num_seqs, num_kv_heads = keys.shape[:2]
    num_rows, num_heads, head_dim = queries.shape
    shaped = queries.reshape(num_seqs, -1, num_heads, head_dim).swapaxes(1, 2)
    if params.softcap is not None:
        output = explicit_attention(shaped, keys, values, part.seen, params)
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
            mask=part.mask,
            sinks=None if sinks is None else sinks.astype(queries.dtype),
        )
        output = output.reshape(num_seqs, num_heads, -1, output.shape[-1])
    return output.swapaxes(1, 2).reshape(num_rows, num_heads, -1).astype(queries.dtype)
