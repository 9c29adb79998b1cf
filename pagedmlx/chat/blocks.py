"""What a snapshot of the engine shows: the state of every cell of the block map, and sums. Pure.

It remembers a little of the snapshots before: whose text a cached block holds, and which blocks
have just been copied on write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagedmlx.core.snapshot import EngineSnapshot, SequenceSnapshot

IntArray = npt.NDArray[np.int32]

FREE, CACHED, USED, SHARED, COPIED = range(5)
"""What is to be told of a block, least first."""

NO_SLOT = -1
"""Owner of a block that belongs to no conversation of this chat, or to none at all."""

_FLASH_S = 1.2
_FIRST_SHOWN = 64
"""Blocks that are shown at least; of a pool that is used more, twice as many, and so on."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The map's cells; arrays by cell.

    Attributes:
        kinds: (num_cells,) uint8; the most notable state among the cell's blocks.
        slots: (num_cells,) int32; whose they are, the slot of a block of that state.
        counts: (num_cells,) int32; most sequences that hold one of its blocks.
        fills: (num_cells,) float32; share of its blocks that are in use.
        per_cell: Blocks in one cell; the last may have fewer.
        num_blocks: Blocks in all cells.
    """

    kinds: npt.NDArray[np.uint8]
    slots: IntArray
    counts: IntArray
    fills: npt.NDArray[np.float32]
    per_cell: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Holder:
    """One sequence that holds a block, and as which part of it.

    Attributes:
        sequence: The sequence.
        position: Place in its block table.
        num_tokens: Slots of the block that it has filled.
    """

    sequence: SequenceSnapshot
    position: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Savings:
    """What paging saves at this moment, in bytes.

    Attributes:
        used_bytes: Taken by blocks in use.
        reserved_bytes: What as many contiguous caches of the longest length would take.
        shared_bytes: What the shared blocks would take if everyone had a copy.
    """

    used_bytes: int
    reserved_bytes: int
    shared_bytes: int

    @property
    def paging_bytes(self) -> int:
        """What is not taken, and would be if each sequence had its longest length reserved."""
        return max(0, self.reserved_bytes - self.used_bytes)


@dataclass(slots=True)
class _PoolMemory:
    slots: IntArray
    copied_s: npt.NDArray[np.float64]
    num_seen: int = 0
    tables: dict[tuple[str, int], tuple[int, IntArray]] = field(
        default_factory=dict[tuple[str, int], tuple[int, IntArray]]
    )


class BlockHistory:
    """Takes in snapshots and tells what the map shows."""

    def __init__(self) -> None:
        self.snapshot: EngineSnapshot | None = None
        self._pools: list[_PoolMemory] = []
        self._now_s = 0.0

    def add(self, snapshot: EngineSnapshot, slots: Mapping[str, int], now_s: float) -> None:
        """Take in what the engine says.

        Args:
            snapshot: What it says.
            slots: The conversation's slot for each request id.
            now_s: Any clock that goes on.
        """
        sizes = [pool.owners.size for pool in snapshot.pools]
        if [pool.slots.size for pool in self._pools] != sizes:
            self._pools = [
                _PoolMemory(np.full(size, NO_SLOT, np.int32), np.full(size, -np.inf))
                for size in sizes
            ]
        self.snapshot, self._now_s = snapshot, now_s
        by_place = [slots.get(each.request_id, NO_SLOT) for each in snapshot.sequences]
        # The owner of a block that nobody holds is -1, and finds the last entry.
        table = np.array([*by_place, NO_SLOT], np.int32)
        for group, pool in enumerate(snapshot.pools):
            memory = self._pools[group]
            kept = np.where(pool.is_cached, memory.slots, NO_SLOT)
            memory.slots = np.where(pool.ref_counts > 0, table[pool.owners], kept)
            taken = np.flatnonzero((pool.ref_counts > 0) | pool.is_cached)
            memory.num_seen = max(memory.num_seen, int(taken[-1]) + 1 if taken.size else 0)
            self._note_copies(memory, snapshot, group)

    def num_shown(self, group: int = 0, room: int = 0) -> int:
        """Blocks that are worth a look: those behind them were never used.

        Args:
            group: The KV group.
            room: Blocks for which there is room anyway.
        """
        memory = self._pools[group]
        wanted = max(_FIRST_SHOWN, room, 1 << max(0, memory.num_seen - 1).bit_length())
        return min(memory.slots.size, wanted)

    def cells(self, num_cells: int, group: int = 0, room: int = 0) -> Cells:
        """The states of at most ``num_cells`` cells, each of equally many of the shown blocks."""
        assert self.snapshot is not None
        pool, memory = self.snapshot.pools[group], self._pools[group]
        size = self.num_shown(group, room)
        ref_counts, slots = pool.ref_counts[:size], memory.slots[:size]
        kinds = np.where(pool.is_cached[:size], CACHED, FREE).astype(np.uint8)
        kinds[ref_counts > 0] = USED
        kinds[ref_counts > 1] = SHARED
        kinds[(self._now_s - memory.copied_s[:size] < _FLASH_S) & (ref_counts > 0)] = COPIED
        per_cell = max(1, -(-size // max(1, num_cells)))
        if per_cell == 1:
            fills = (ref_counts > 0).astype(np.float32)
            return Cells(kinds, slots, ref_counts, fills, 1, size)
        count = -(-size // per_cell)
        starts = np.arange(count) * per_cell

        def padded(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
            rest = np.zeros(count * per_cell - size, values.dtype)
            return np.concatenate([values, rest]).reshape(count, per_cell)

        best = padded(kinds).argmax(axis=1)
        at = starts + best
        lengths = np.minimum(per_cell, size - starts)
        used = padded(ref_counts > 0).sum(axis=1)
        fills = (used / lengths).astype(np.float32)
        counts = padded(ref_counts).max(axis=1)
        return Cells(kinds[at], slots[at], counts.astype(np.int32), fills, per_cell, size)

    def slot(self, block_id: int, group: int = 0) -> int:
        """Whose text a block holds, or held last."""
        return int(self._pools[group].slots[block_id])

    def _note_copies(self, memory: _PoolMemory, snapshot: EngineSnapshot, group: int) -> None:
        ref_counts = snapshot.pools[group].ref_counts
        size = snapshot.stats.block_size
        tables: dict[tuple[str, int], tuple[int, IntArray]] = {}
        for sequence in snapshot.sequences:
            key = (sequence.request_id, sequence.index)
            now = sequence.block_ids[group]
            tables[key] = (sequence.num_preemptions, now)
            num_preemptions, before = memory.tables.get(key, (0, now[:0]))
            if before.size and num_preemptions == sequence.num_preemptions:
                both = min(before.size, now.size)
                # A place that a window has passed is empty.
                changed = (before[:both] != now[:both]) & (now[:both] >= 0)
                copied = now[:both][changed]
            else:
                copied = _copied_at_start(sequence, now, size)
            memory.copied_s[copied[ref_counts[copied] == 1]] = self._now_s
        memory.tables = tables


def _copied_at_start(sequence: SequenceSnapshot, block_ids: IntArray, size: int) -> IntArray:
    """The partly matching block that a new sequence copied, if it began with one."""
    shared = sequence.num_cached_tokens
    if not size or not shared % size:
        return block_ids[:0]
    return block_ids[shared // size : shared // size + 1]


def holders(snapshot: EngineSnapshot, block_id: int, group: int = 0) -> list[Holder]:
    """Every sequence that holds a block."""
    size = snapshot.stats.block_size
    found: list[Holder] = []
    for sequence in snapshot.sequences:
        for position in np.flatnonzero(sequence.block_ids[group] == block_id).tolist():
            filled = min(size, max(0, sequence.num_computed_tokens - position * size))
            found.append(Holder(sequence, position, filled))
    return found


def savings(snapshot: EngineSnapshot, max_len: int | None) -> Savings:
    """What paging saves, against one contiguous cache of ``max_len`` tokens for each sequence."""
    stats = snapshot.stats
    block_bytes = stats.block_bytes // max(1, len(snapshot.pools))
    used = shared = 0
    for pool in snapshot.pools:
        num_used = int(np.count_nonzero(pool.ref_counts))
        used += num_used
        shared += int(pool.ref_counts.sum()) - num_used
    num_holding = sum(each.block_ids[0].size > 0 for each in snapshot.sequences)
    each_bytes = -(-(max_len or 0) // max(1, stats.block_size)) * stats.block_bytes
    return Savings(used * block_bytes, num_holding * each_bytes, shared * block_bytes)
