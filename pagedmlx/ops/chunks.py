"""Attention of prefill chunks: their context is gathered, then MLX's own attention runs on it.

Where a chunk is the whole context of its sequence, its K and V need no gathering, unless only the
kernel that wrote them has rotated them.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import NO_BLOCK, BatchArrays
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import AttentionParams, GroupBatch
from pagedmlx.ops.gather import attend_gathered, own_rows
from pagedmlx.ops.launch import Launch, Launcher
from pagedmlx.ops.reference import visible
from pagedmlx.ops.scratch import ALIGNMENT, Scratch
from pagedmlx.ops.variants import GatherVariant
from pagedmlx.ops.worklist import HEADER

_THREADS = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence with many rows.

    Attributes:
        plan: What to gather, as ``gather.metal`` reads it.
        start: Where in the step's scratch memory, in tokens.
        num_rows: L, its rows.
        num_tokens: N, the tokens that any of its rows sees.
        seen: (L, N) booleans.
        mask: ``seen`` in the cheapest form that MLX's attention takes.
        variant: The kernel that gathers.
        own: Its rows in the step, if they are its whole context.
    """

    plan: mx.array
    start: int
    num_rows: int
    num_tokens: int
    seen: mx.array
    mask: mx.array | str
    variant: GatherVariant
    own: slice | None


def plan_chunk(
    host: BatchArrays,
    index: int,
    group: int,
    window: int | None,
    variant: GatherVariant,
    start: int,
) -> Chunk:
    """What the rows of one sequence of a step read.

    Args:
        host: The step.
        index: The sequence.
        group: The KV group.
        window: Tokens that a query sees; None is all.
        variant: The kernel that gathers.
        start: As in ``Chunk``, a multiple of ``ALIGNMENT``.
    """
    end = int(host.context_lens[index])
    rows = slice(*(int(row) for row in host.query_start_loc[index : index + 2]))
    first = end - (rows.stop - rows.start)
    low = 0 if window is None else max(first - window + 1, 0)
    pool = variant.pool
    table = host.groups[group].block_tables[index, : -(-end // pool.block_size)]
    plan = np.zeros(HEADER + len(table), dtype=np.int32)
    at = start * pool.num_kv_heads // ALIGNMENT
    plan[:4] = low, end - low, at * pool.k_head_dim, at * pool.v_head_dim
    plan[HEADER:] = np.where(table == NO_BLOCK, 0, table)
    seen = visible(mx.arange(first, end), mx.arange(low, end), window)
    mask = "causal" if window is None or end <= window else seen
    own = rows if first == 0 else None
    return Chunk(mx.array(plan), start, end - first, end - low, seen, mask, variant, own)


def attend_chunk(
    launcher: Launcher,
    queries: mx.array,
    layer: int,
    group: GroupBatch,
    store: KVStore,
    scratch: Scratch,
    chunk: Chunk,
    params: AttentionParams,
) -> mx.array:
    """Attend the rows of a chunk.

    Args:
        launcher: Runs the gather.
        queries: (L, num_heads, k_head_dim).
        layer: The layer whose K and V are read.
        group: The layer's KV group in this step.
        store: Owner of the pool.
        scratch: Has room for what the step's chunks gather.
        chunk: From ``plan_chunk``.
        params: The layer's settings.

    Returns:
        (L, num_heads, v_head_dim) in the type of ``queries``.
    """
    own = None if chunk.own is None else own_rows(store, layer, group, chunk.own)
    if own is not None:
        return attend_gathered(queries, *own, chunk.mask, chunk.seen, params)
    pool, token = store.bind(layer)
    shape = chunk.variant.pool
    num_copied = shape.num_kv_heads * chunk.num_tokens * shape.row_vectors
    (passed,) = launcher(
        Launch(
            chunk.variant.kernel,
            [*scratch.bound(chunk.variant), queries, *pool.bound, chunk.plan, token],
            max(num_copied, queries.size // 4),
            _THREADS,
            [queries.shape],
            [queries.dtype],
        )
    )
    keys, values = scratch.part(chunk.variant, chunk.start, chunk.num_tokens)
    if params.softcap is not None:
        # Here they are read apart from the queries, and so must come of them to be read later.
        nothing = 0 * passed[:1, :1, :1]
        keys, values = keys + nothing, values + nothing
    return attend_gathered(passed, keys, values, chunk.mask, chunk.seen, params)
