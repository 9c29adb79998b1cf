"""Runs of rows that see tokens in the same blocks: attended together, the tokens cut in chunks.

The rows are one each of several sequences that begin alike (``cascade``), or those of a sequence's
chunk (``split_prefill``). Few rows have few tiles, so ``prefill.metal`` cuts their tokens until its
threadgroups fill the device, and ``merge.metal`` puts the results together by log-sum-exp.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.core.batch import Int32Array
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.launch import Launch, Launcher
from pagedmlx.ops.prefill import PrefillVariant
from pagedmlx.ops.worklist import HEADER, ITEM, MAX_CHUNK, MIN_CHUNK, UNLIMITED, bucket

_MOST_PARTS = 8
"""Of a long run, where its tiles alone fill the device: all of them wait in memory to be merged."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that see the first tokens of the same block table.

    Attributes:
        rows: Their places among the queries.
        num_tokens: How many tokens there are.
        first_end: One past the last of them that the first row sees; each next row sees one more.
            All rows see all of them if it is ``UNLIMITED``.
    """

    rows: npt.NDArray[np.intp]
    num_tokens: int
    first_end: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the rows of some runs find in their runs' tokens, cut in chunks.

    Attributes:
        plan: As ``prefill.metal`` reads it where SPLIT; at last on the device.
        num_items: Work items that the grid must have room for.
        variant: The kernel.
        max_chunks: Partial results of the row that has most.
        merges: (T, 3) where ``merge.metal`` finds those of each row: its run's first item, the
            chunks of a tile, and its place in the run; zeros for a row that is in no run.
    """

    plan: mx.array | Int32Array
    num_items: int
    variant: PrefillVariant
    max_chunks: int
    merges: Int32Array

    @property
    def shape(self) -> tuple[object, ...]:
        """What must agree for two steps to be the same graph."""
        return self.num_items, self.plan.size, self.variant

    def with_plan(self, arrays: Iterator[mx.array]) -> RunPlan:
        """The same with its plan on the device."""
        return replace(self, plan=next(arrays))


def plan_runs(
    runs: Sequence[Run],
    tables: Sequence[Int32Array],
    num_rows: int,
    variant: PrefillVariant,
    most_groups: int,
) -> RunPlan:
    """Cut the runs' tokens into chunks, and the vectors that attend them into tiles.

    Args:
        runs: At least one; no row is in two.
        tables: For each run (B,) the block table of its tokens, or more.
        num_rows: T, of all queries.
        variant: The prefill of these layers.
        most_groups: Threadgroups that are to run at once.
    """
    pool = variant.pool
    num_tiles = [-(-len(run.rows) * variant.factor // variant.vectors) for run in runs]
    most = most_groups // pool.num_kv_heads
    chunk, num_items = _choose_chunk(runs, num_tiles, most)
    # Of few sizes, so that steps resemble each other; idle threadgroups end at once.
    room = max(num_items, min(most, bucket(num_items, 1)))
    at = HEADER + ITEM * num_items
    widths = [-(-run.num_tokens // pool.block_size) for run in runs]
    size = HEADER + ITEM * room + num_rows + sum(widths)
    plan = np.zeros(bucket(size, 1), dtype=np.int32)
    plan[:2] = num_items, UNLIMITED
    merges = np.zeros((num_rows, 3), dtype=np.int32)
    items = plan[HEADER:at].reshape(num_items, ITEM)
    first_item = 0
    for run, table, tiles, width in zip(runs, tables, num_tiles, widths, strict=True):
        count = len(run.rows)
        starts = np.arange(0, run.num_tokens, chunk)
        mine = items[first_item : first_item + tiles * len(starts)]
        mine[:, 0] = at
        mine[:, 1] = count
        mine[:, 2] = np.tile(np.minimum(starts + chunk, run.num_tokens), tiles)
        mine[:, 3] = at + count
        mine[:, 4] = np.repeat(np.arange(tiles) * variant.vectors, len(starts))
        mine[:, 5] = np.tile(starts, tiles)
        mine[:, 6] = run.first_end
        plan[at : at + count] = run.rows
        plan[at + count : at + count + width] = table[:width]
        merges[run.rows] = first_item, len(starts), 0
        merges[run.rows, 2] = np.arange(count)
        first_item += len(mine)
        at += count + width
    return RunPlan(plan, room, variant.splitting, int(merges[:, 1].max()), merges)


def idle_runs(variant: PrefillVariant) -> RunPlan:
    """Nothing to do, for one row that is in no run."""
    plan = np.zeros(HEADER + ITEM, np.int32)
    return RunPlan(plan, 1, variant.splitting, 0, np.zeros((1, 3), np.int32))


def _choose_chunk(runs: Sequence[Run], num_tiles: Sequence[int], max_items: int) -> tuple[int, int]:
    """The shortest chunk with which no more items come about than that, and how many do.

    It is no longer than ``MAX_CHUNK``, or than leaves the longest run in ``_MOST_PARTS``.
    """

    def num_items(chunk: int) -> int:
        return sum(
            tiles * -(-run.num_tokens // chunk) for run, tiles in zip(runs, num_tiles, strict=True)
        )

    longest = max(MAX_CHUNK, max(run.num_tokens for run in runs) // _MOST_PARTS)
    chunks = range(MIN_CHUNK, longest + 1, MIN_CHUNK)
    # The longer they are, the fewer items.
    place = bisect_left(chunks, -max_items, key=lambda chunk: -num_items(chunk))
    chunk = chunks[min(place, len(chunks) - 1)]
    return chunk, num_items(chunk)


def attend_runs(
    launcher: Launcher, queries: mx.array, layer: int, store: KVStore, runs: RunPlan
) -> list[mx.array]:
    """Attend the runs' tokens.

    Args:
        launcher: Runs the kernel.
        queries: (T, num_heads, k_head_dim).
        layer: The layer whose K and V are read.
        store: Owner of the pool.
        runs: From ``plan_runs``, on the device.

    Returns:
        Partial results (items, H, vectors, v_head_dim) and their stats (items, H, vectors, 2),
        float32, for ``merge.metal``.
    """
    pool, token = store.bind(layer)
    variant = runs.variant
    assert isinstance(runs.plan, mx.array)
    partials = (runs.num_items, variant.pool.num_kv_heads, variant.vectors)
    return launcher(
        Launch(
            variant.kernel,
            [queries, *pool.bound, runs.plan, token],
            runs.num_items * variant.pool.num_kv_heads * variant.threads,
            variant.threads,
            [(*partials, variant.pool.v_head_dim), (*partials, 2)],
            [mx.float32, mx.float32],
        )
    )
