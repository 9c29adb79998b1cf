"""Cascade attention: tokens that several sequences share are attended once, for all their rows.

Sequences that begin alike hold the same blocks. Decoding them one by one reads those blocks once
for each; here ``prefill.metal`` attends them with the rows of all sharers at a time, ``decode``
attends what each sequence has for itself, and ``merge.metal`` puts both together by log-sum-exp.
After the cascade inference of FlashInfer and Hydragen (Juravsky et al., 2024), with one level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.core.batch import Int32Array
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.launch import Launch, Launcher
from pagedmlx.ops.prefill import PrefillVariant
from pagedmlx.ops.worklist import HEADER, ITEM, MAX_CHUNK, MIN_CHUNK, UNLIMITED, WorkList, bucket

_WAVE_SHARES = {1: 0.75, 2: 0.5}
"""Of the threadgroups that run at once, by columns: matrices take so many more registers. Measured
on CUDA."""


class CascadePath(StrEnum):
    """Whether shared tokens are attended once: ``auto`` where that was measured to be faster."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Sequences whose first tokens lie in the same blocks; or the rows of a chunk, as if they were.

    Attributes:
        sequences: Their places.
        num_tokens: How many tokens, whole blocks of them; fewer than any of them has.
    """

    sequences: npt.NDArray[np.intp]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Cascade:
    """The shared part of some rows' attention.

    Attributes:
        plan: As ``prefill.metal`` reads it where SHARED; at last on the device.
        num_items: Work items that the grid must have room for.
        variant: The kernel.
        max_chunks: Shared results of the row that has most.
        lows: (S,) the first token that is left to each sequence.
        merges: (S, 3) what ``merge.metal`` needs of each row: its run's first item, the chunks of
            a tile, and its place in the run.
    """

    plan: mx.array | Int32Array
    num_items: int
    variant: PrefillVariant
    max_chunks: int
    lows: Int32Array
    merges: Int32Array

    @property
    def shape(self) -> tuple[object, ...]:
        """What must agree for two steps to be the same graph."""
        return self.num_items, self.plan.size, self.variant

    def mark(self, work: WorkList) -> None:
        """Tell each row of a work list which shared results are its own; padding has none."""
        work.merge_rows[: len(self.merges), 3:6] = self.merges


@dataclass(frozen=True, slots=True)
class _Remembered:
    """What was found for the sequences of a step.

    Attributes:
        sequences: Whose.
        blocks: (S, B) their first blocks, so many as the longest run has.
        is_own: (S, B) whether a block belongs to no run.
        cascade: What came of it.
    """

    sequences: tuple[object, ...]
    blocks: Int32Array
    is_own: npt.NDArray[np.bool_]
    cascade: Cascade | None

    def holds(self, sequences: tuple[object, ...], tables: Int32Array) -> bool:
        """Whether it is still so: sequences that stay together share no more than before."""
        if not sequences or sequences != self.sequences:
            return False
        now = tables[:, : self.blocks.shape[1]]
        return now.shape == self.blocks.shape and bool(((now == self.blocks) | self.is_own).all())


class CascadePlanner:
    """Plans what is shared in decode steps, and remembers it while the same sequences run.

    Args:
        path: Whether to.
        wave: Threadgroups that the device runs at once.

    Attributes:
        thresholds: For layers with these prefills, how many tokens at least must be spared for a
            cascade to be faster; for others it isn't. Only ``auto`` asks.
    """

    def __init__(self, path: CascadePath, wave: int) -> None:
        self._path = path
        self._wave = wave
        self.thresholds: dict[PrefillVariant, int] = {}
        self._last: dict[tuple[int, PrefillVariant], _Remembered] = {}

    def try_plan(
        self,
        group: int,
        sequences: tuple[object, ...],
        tables: Int32Array,
        context_lens: Int32Array,
        variant: PrefillVariant,
    ) -> Cascade | None:
        """Plan a step, if enough is shared.

        Args:
            group: The KV group.
            sequences: Whose rows they are; empty if nobody knows.
            tables: (S, B) block tables; row s of the queries belongs to sequence s.
            context_lens: (S,) tokens of each sequence.
            variant: The prefill of these layers.
        """
        least = self._least(variant)
        if least is None or len(tables) < 2:
            return None
        last = self._last.get((group, variant))
        if last is not None and last.holds(sequences, tables):
            return last.cascade
        runs = find_runs(tables, context_lens, variant.pool.block_size)
        cascade = None
        if runs and sum(map(_num_spared, runs)) >= least:
            cascade = plan_cascade(runs, tables, variant, self._wave)
        num_shared = np.zeros(len(tables), np.int32)
        for run in runs:
            num_shared[run.sequences] = run.num_tokens // variant.pool.block_size
        is_own = np.arange(num_shared.max()) >= num_shared[:, None]
        blocks = tables[:, : is_own.shape[1]].copy()
        self._last[group, variant] = _Remembered(sequences, blocks, is_own, cascade)
        return cascade

    def forget(self) -> None:
        """Nothing runs any more."""
        self._last.clear()

    def _least(self, variant: PrefillVariant) -> int | None:
        if not variant.is_supported:
            return None
        match self._path:
            case CascadePath.ON:
                return 0
            case CascadePath.OFF:
                return None
            case CascadePath.AUTO:
                return self.thresholds.get(variant)


def find_runs(tables: Int32Array, context_lens: Int32Array, block_size: int) -> list[SharedRun]:
    """Find who shares what, so that much is spared; no sequence is in two runs.

    Sorted, sequences that begin alike are neighbours, and all groups of them are the nodes of a
    tree: the more blocks a group shares, the deeper and the smaller it is. One pass closes each
    after those within it, and keeps it or them.

    Args:
        tables: (S, B) block tables.
        context_lens: (S,) tokens of each sequence; the last one's block is its own.
        block_size: Tokens in a block.
    """
    # Blocks before the one with the newest token; what follows them is like nothing else.
    most = (context_lens - 1) // block_size
    width = int(most.max())
    if width == 0:
        return []
    places = np.arange(len(tables), dtype=np.int32)[:, None]
    blocks = np.where(np.arange(width) < most[:, None], tables[:, :width], -1 - places)
    order = np.argsort(blocks.view(f"V{width * blocks.itemsize}").ravel())
    blocks = blocks[order]
    differ = blocks[1:] != blocks[:-1]
    common = np.where(differ.any(axis=1), differ.argmax(axis=1), width)
    going_on: list[_Group] = []
    for last, depth in enumerate([*common.tolist(), 0]):
        group = _Group(depth, last, 0, [], [last])
        while going_on and going_on[-1].depth >= depth:
            group = going_on.pop().joined(group)
            if group.depth > depth:
                group.close(last)
        group.depth = depth
        going_on.append(group)
    return [SharedRun(np.sort(order[who]), shared * block_size) for who, shared in going_on[0].runs]


@dataclass(slots=True)
class _Group:
    """Neighbours that begin alike.

    Attributes:
        depth: Blocks that they share.
        first: The first member.
        spared: Blocks that its runs spare.
        runs: Members with the blocks that they share.
        alone: Members in no run.
    """

    depth: int
    first: int
    spared: int
    runs: list[tuple[list[int], int]]
    alone: list[int]

    def joined(self, other: _Group) -> _Group:
        """The same with what comes next."""
        self.spared += other.spared
        self.runs += other.runs
        self.alone += other.alone
        return self

    def close(self, last: int) -> None:
        """Its last member is known: who is alone is a run too, or all of them are one."""
        if len(self.alone) > 1:
            self.spared += self.depth * (len(self.alone) - 1)
            self.runs.append((self.alone, self.depth))
            self.alone = []
        spared_by_all = self.depth * (last - self.first)
        if spared_by_all >= self.spared:
            self.spared = spared_by_all
            self.runs, self.alone = [(list(range(self.first, last + 1)), self.depth)], []


def _num_spared(run: SharedRun) -> int:
    return run.num_tokens * (len(run.sequences) - 1)


def plan_cascade(
    runs: Sequence[SharedRun], tables: Int32Array, variant: PrefillVariant, wave: int
) -> Cascade:
    """Cut the shared tokens into chunks, and the vectors that attend them into tiles.

    Args:
        runs: From ``find_runs``; at least one.
        tables: As for ``CascadePlanner``.
        variant: Likewise.
        wave: Likewise.
    """
    pool = variant.pool
    num_tiles = [-(-len(run.sequences) * variant.factor // variant.vectors) for run in runs]
    most = int(wave * _WAVE_SHARES[variant.columns]) // pool.num_kv_heads
    chunk, num_items = _choose_chunk(runs, num_tiles, most)
    at = HEADER + ITEM * num_items
    sizes = [len(run.sequences) + run.num_tokens // pool.block_size for run in runs]
    plan = np.zeros(bucket(at + sum(sizes), 4), dtype=np.int32)
    plan[:2] = num_items, UNLIMITED
    merges = np.zeros((len(tables), 3), dtype=np.int32)
    lows = np.zeros(len(tables), dtype=np.int32)
    items = plan[HEADER:at].reshape(num_items, ITEM)
    first_item = 0
    for run, tiles, size in zip(runs, num_tiles, sizes, strict=True):
        num_rows = len(run.sequences)
        starts = np.arange(0, run.num_tokens, chunk)
        mine = items[first_item : first_item + tiles * len(starts)]
        mine[:, 0] = at
        mine[:, 1] = num_rows
        mine[:, 2] = np.tile(np.minimum(starts + chunk, run.num_tokens), tiles)
        mine[:, 3] = at + num_rows
        mine[:, 4] = np.repeat(np.arange(tiles) * variant.vectors, len(starts))
        mine[:, 5] = np.tile(starts, tiles)
        plan[at : at + num_rows] = run.sequences
        plan[at + num_rows : at + size] = tables[run.sequences[0], : size - num_rows]
        merges[run.sequences] = first_item, len(starts), 0
        merges[run.sequences, 2] = np.arange(num_rows)
        lows[run.sequences] = run.num_tokens
        first_item += len(mine)
        at += size
    max_chunks = int(merges[:, 1].max())
    return Cascade(plan, bucket(num_items), variant.sharing, max_chunks, lows, merges)


def idle_cascade(variant: PrefillVariant) -> Cascade:
    """One with nothing to do, for one row that shares nothing."""
    nothing = np.zeros((1, 3), np.int32)
    return Cascade(
        np.zeros(HEADER + ITEM, np.int32), 1, variant.sharing, 0, nothing[0, :1], nothing
    )


def _choose_chunk(
    runs: Sequence[SharedRun], num_tiles: Sequence[int], max_items: int
) -> tuple[int, int]:
    """The shortest chunk with which no more items come about than that, and how many do."""
    num_items = 0
    for chunk in range(MIN_CHUNK, MAX_CHUNK + 1, MIN_CHUNK):
        num_items = sum(
            tiles * -(-run.num_tokens // chunk) for run, tiles in zip(runs, num_tiles, strict=True)
        )
        if num_items <= max_items:
            return chunk, num_items
    return MAX_CHUNK, num_items


def attend_shared(
    launcher: Launcher, queries: mx.array, layer: int, store: KVStore, cascade: Cascade
) -> list[mx.array]:
    """Attend the shared tokens.

    Args:
        launcher: Runs the kernel.
        queries: (S, num_heads, k_head_dim).
        layer: The layer whose K and V are read.
        store: Owner of the pool.
        cascade: From ``plan_cascade``.

    Returns:
        Partial results (items, H, vectors, v_head_dim) and their stats (items, H, vectors, 2),
        float32, for ``merge.metal``.
    """
    pool, token = store.bind(layer)
    variant = cascade.variant
    assert isinstance(cascade.plan, mx.array)
    partials = (cascade.num_items, variant.pool.num_kv_heads, variant.vectors)
    return launcher(
        Launch(
            variant.kernel,
            [queries, *pool.bound, cascade.plan, token],
            cascade.num_items * variant.pool.num_kv_heads * variant.threads,
            variant.threads,
            [(*partials, variant.pool.v_head_dim), (*partials, 2)],
            [mx.float32, mx.float32],
        )
    )
