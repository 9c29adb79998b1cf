"""BlockPool: hands out, shares and takes back the blocks of one KV group, each in O(1)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pagedmlx.core.block import Block
from pagedmlx.core.prefix import PrefixIndex


class BlockPool:
    """Up to so many blocks, their reference counts and the queue of those not in use.

    Free and cached blocks form one queue in the order in which they are taken: plain free blocks
    from its head, then cached ones, least recently used first. Blocks are created, in the order of
    their ids, when none of these will do; ``give_back`` takes the last ones away again. So the
    arrays need to be no larger than what has been in use lately.

    Args:
        num_blocks: Most blocks that there may be.
        index: The group's prefix index, from which evicted blocks are removed.
        num_kept_blocks: From so many blocks on, cached ones are evicted before more are created;
            None is all.

    Attributes:
        num_evictions: Cached blocks that were given up for others.
        peak_used_blocks: Most blocks in use at any time.
        recent_used_blocks: Most blocks in use since this was last set.
    """

    def __init__(
        self, num_blocks: int, index: PrefixIndex, num_kept_blocks: int | None = None
    ) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.peak_used_blocks = 0
        self.recent_used_blocks = 0
        self._num_kept_blocks = num_blocks if num_kept_blocks is None else num_kept_blocks
        self._index = index
        self._blocks: list[Block] = []
        self._num_queued = 0
        self._num_cached = 0
        self._num_shared = 0
        self._is_cached = bytearray(num_blocks)
        # The queue is a ring through this sentinel: its ``next`` is the head.
        self._ring = Block(-1)
        self._ring.prev = self._ring.next = self._ring

    @property
    def num_available_blocks(self) -> int:
        """Blocks that ``allocate`` can give now: free or cached."""
        return self.num_blocks - len(self._blocks) + self._num_queued

    @property
    def num_created_blocks(self) -> int:
        """Blocks that there are, with the ids below this number."""
        return len(self._blocks)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some table holds."""
        return len(self._blocks) - self._num_queued

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no table holds, but whose content is known."""
        return self._num_cached

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds and whose content is of no use."""
        return self.num_available_blocks - self._num_cached

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that more than one table holds."""
        return self._num_shared

    @property
    def is_cached(self) -> npt.NDArray[np.bool_]:
        """(num_blocks,) whether no table holds a block, but its content is known; a copy."""
        return np.frombuffer(self._is_cached, np.bool_).copy()

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether ``allocate`` would succeed this many times in a row."""
        return num_blocks <= self.num_available_blocks

    def num_created_after(self, num_blocks: int, num_held: int) -> int:
        """Blocks that there are after ``allocate`` has given this many in a row.

        Args:
            num_blocks: Blocks to allocate.
            num_held: Those of them that are still held then; the others are cached.
        """
        created = len(self._blocks)
        num_free = self._num_queued - self._num_cached
        after = created + max(0, num_blocks - num_free)
        kept = max(created, self._num_kept_blocks)
        if after > kept:
            # Behind that, only what is held needs room.
            after = max(kept, self.num_used_blocks + num_held)
        return min(after, self.num_blocks)

    def allocate(self) -> Block:
        """Take a block: a free one, else a new one, else the least recently used cached one."""
        assert self.can_allocate(1), "allocate without can_allocate"
        block = self._head()
        num_created = len(self._blocks)
        if block is self._ring or (
            block.block_hash is not None and num_created < self._num_kept_blocks
        ):
            block = Block(num_created)
            self._blocks.append(block)
        else:
            self._unlink(block)
            if block.block_hash is not None:
                self._index.remove(block)
                self._uncache(block)
                self.num_evictions += 1
        block.ref_count = 1
        self._note_use()
        return block

    def share(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each; cached blocks come back into use."""
        for block in blocks:
            if block.ref_count == 0:
                assert block.block_hash is not None, "a free block has no content to share"
                self._unlink(block)
                self._uncache(block)
            block.ref_count += 1
            self._num_shared += block.ref_count == 2
        self._note_use()

    def free(self, block: Block) -> None:
        """Drop a reference; without any left the block is cached if indexed, else free."""
        assert block.ref_count > 0, "block freed twice"
        block.ref_count -= 1
        self._num_shared -= block.ref_count == 1
        if block.ref_count > 0:
            return
        if block.block_hash is not None:
            self._num_cached += 1
            self._is_cached[block.block_id] = True
            self._link_before(block, self._ring)
        else:
            self._link_before(block, self._head())

    def forget(self, block: Block) -> None:
        """Note that the index dropped a block by itself: a cached one becomes plain free."""
        assert block.block_hash is None
        if block.ref_count == 0:
            self._uncache(block)
            self._unlink(block)
            self._link_before(block, self._head())

    def reset_cache(self) -> int:
        """Forget every cached block; returns how many there were."""
        count = 0
        block = self._ring.prev
        while block is not None and block is not self._ring and block.block_hash is not None:
            before = block.prev
            self._index.remove(block)
            self.forget(block)
            count += 1
            block = before
        return count

    def give_back(self, num_kept: int) -> int:
        """Forget blocks from the last one down, as far as none is in use; cached ones too.

        Args:
            num_kept: Blocks that stay in any case.

        Returns:
            How many blocks are left.
        """
        while len(self._blocks) > num_kept and self._blocks[-1].ref_count == 0:
            block = self._blocks.pop()
            self._unlink(block)
            if block.block_hash is not None:
                self._index.remove(block)
                self._uncache(block)
        return len(self._blocks)

    def check_integrity(self, table_counts: dict[int, int]) -> None:
        """Assert every invariant of the pool.

        Args:
            table_counts: Block id to the number of tables that hold it, for all live tables.
        """
        queued: list[Block] = []
        block = self._ring.next
        while block is not None and block is not self._ring:
            assert block.next is not None and block.next.prev is block, "queue is torn"
            queued.append(block)
            assert len(queued) <= len(self._blocks), "queue is a loop"
            block = block.next
        queued_ids = {block.block_id for block in queued}
        assert len(queued) == len(queued_ids) == self._num_queued, "queue length is off"
        hashes = [block.block_hash is not None for block in queued]
        assert hashes == sorted(hashes), "a cached block stands before a plain free one"
        assert sum(hashes) == self._num_cached, "count of cached blocks is off"
        cached_ids = {b.block_id for b, is_cached in zip(queued, hashes, strict=True) if is_cached}
        assert set(np.flatnonzero(self.is_cached)) == cached_ids, "marks of cached blocks are off"
        num_shared = sum(block.ref_count > 1 for block in self._blocks)
        assert num_shared == self._num_shared, "count of shared blocks is off"
        indexed = {entry.block.block_id: key for key, entry in self._index}
        assert len(indexed) == len(self._index), "two hashes name one block"
        for block_id, block in enumerate(self._blocks):
            assert block.block_id == block_id
            expected = table_counts.get(block_id, 0)
            assert block.ref_count == expected, f"{block} is held by {expected} tables"
            assert (block.ref_count == 0) == (block_id in queued_ids), f"{block} is in two states"
            assert indexed.get(block_id) == block.block_hash, f"index is stale for {block}"
        assert all(block_id < len(self._blocks) for block_id in table_counts)

    def _note_use(self) -> None:
        used = self.num_used_blocks
        self.recent_used_blocks = max(self.recent_used_blocks, used)
        self.peak_used_blocks = max(self.peak_used_blocks, used)

    def _uncache(self, block: Block) -> None:
        self._num_cached -= 1
        self._is_cached[block.block_id] = False

    def _head(self) -> Block:
        assert self._ring.next is not None
        return self._ring.next

    def _link_before(self, block: Block, successor: Block) -> None:
        predecessor = successor.prev
        assert predecessor is not None
        block.prev, block.next = predecessor, successor
        predecessor.next = successor.prev = block
        self._num_queued += 1

    def _unlink(self, block: Block) -> None:
        assert block.prev is not None and block.next is not None
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self._num_queued -= 1
