"""Cascade attention: tokens that several sequences share are attended once, for all their rows.

Sequences that begin alike hold the same blocks. Decoding them one by one reads those blocks once
for each; here the rows of all sharers attend them together (``runs``), ``decode`` attends what each
sequence has for itself, and ``merge.metal`` puts both together by log-sum-exp.
After the cascade inference of FlashInfer and Hydragen (Juravsky et al., 2024), with one level.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from pagedmlx.core.batch import Int32Array
from pagedmlx.ops.prefill import PrefillVariant
from pagedmlx.ops.runs import Run, RunPlan, idle_runs, plan_runs
from pagedmlx.ops.worklist import WorkList


class CascadePath(StrEnum):
    """Whether shared tokens are attended once: ``auto`` where that was measured to be faster."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Cascade:
    """The shared part of some rows' attention.

    Attributes:
        runs: Attends it.
        lows: (S,) the first token that is left to each sequence.
    """

    runs: RunPlan
    lows: Int32Array

    def mark(self, work: WorkList) -> None:
        """Tell each row of a work list which shared results are its own; padding has none."""
        merges = self.runs.merges
        work.merge_rows[: len(merges), 3:6] = merges


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
        path: As given; another may be taken from the next step on.
        thresholds: For layers with these prefills, how many tokens at least must be spared for a
            cascade to be faster; for others it isn't. Only ``auto`` asks.
    """

    def __init__(self, path: CascadePath, wave: int) -> None:
        self.path = path
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
            num_shared[run.rows] = run.num_tokens // variant.pool.block_size
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
        match self.path:
            case CascadePath.ON:
                return 0
            case CascadePath.OFF:
                return None
            case CascadePath.AUTO:
                return self.thresholds.get(variant)


def find_runs(tables: Int32Array, context_lens: Int32Array, block_size: int) -> list[Run]:
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
    return [Run(np.sort(order[who]), shared * block_size) for who, shared in going_on[0].runs]


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


def _num_spared(run: Run) -> int:
    return run.num_tokens * (len(run.rows) - 1)


def plan_cascade(
    runs: list[Run], tables: Int32Array, variant: PrefillVariant, wave: int
) -> Cascade:
    """Plan the attention of what is shared.

    Args:
        runs: From ``find_runs``; at least one.
        tables: As for ``CascadePlanner``.
        variant: Likewise.
        wave: Likewise.
    """
    lows = np.zeros(len(tables), dtype=np.int32)
    for run in runs:
        lows[run.rows] = run.num_tokens
    own_tables = [tables[run.rows[0]] for run in runs]
    # Few: decode.metal runs beside them, and more take longer to merge. Measured on CUDA.
    return Cascade(plan_runs(runs, own_tables, len(tables), variant, wave // 4), lows)


def idle_cascade(variant: PrefillVariant) -> Cascade:
    """One with nothing to do, for one row that shares nothing."""
    return Cascade(idle_runs(variant), np.zeros(1, np.int32))
