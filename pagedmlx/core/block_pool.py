"""BlockPool: hands out, shares and takes back the blocks of one KV group, each in O(1)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pagedmlx.core.block import Block
from pagedmlx.core.prefix import PrefixIndex


class BlockPool:
    """Up to so many blocks, their reference counts and those not in use in the order of taking.

    Plain free blocks are taken first, the one freed last before others, then cached ones, least
    recently used first. Blocks are created, in the order of their ids, when none of these will do;
    ``give_back`` takes the last ones away again. So the arrays need to be no larger than what has
    been in use lately.

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
        self._num_shared = 0
        # By their ids: the last of the free ones is taken first, and then the first cached one.
        self._free: dict[int, Block] = {}
        self._cached: OrderedDict[int, Block] = OrderedDict()

    @property
    def num_available_blocks(self) -> int:
        """Blocks that ``allocate`` can give now: free or cached."""
        return self.num_blocks - self.num_used_blocks

    @property
    def num_created_blocks(self) -> int:
        """Blocks that there are, with the ids below this number."""
        return len(self._blocks)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some table holds."""
        return len(self._blocks) - len(self._free) - len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no table holds, but whose content is known."""
        return len(self._cached)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds and whose content is of no use."""
        return self.num_available_blocks - len(self._cached)

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that more than one table holds."""
        return self._num_shared

    @property
    def is_cached(self) -> npt.NDArray[np.bool_]:
        """(num_blocks,) whether no table holds a block, but its content is known."""
        is_cached = np.zeros(self.num_blocks, np.bool_)
        is_cached[list(self._cached)] = True
        return is_cached

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
        after = created + max(0, num_blocks - len(self._free))
        kept = max(created, self._num_kept_blocks)
        if after > kept:
            # Behind that, only what is held needs room.
            after = max(kept, self.num_used_blocks + num_held)
        return min(after, self.num_blocks)

    def allocate(self) -> Block:
        """Take a block: a free one, else a new one, else the least recently used cached one."""
        assert self.can_allocate(1), "allocate without can_allocate"
        num_created = len(self._blocks)
        if self._free:
            _, block = self._free.popitem()
        elif self._cached and num_created >= self._num_kept_blocks:
            _, block = self._cached.popitem(last=False)
            self._index.remove(block)
            self.num_evictions += 1
        else:
            block = Block(num_created)
            self._blocks.append(block)
        block.ref_count = 1
        self._note_use()
        return block

    def share(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each; cached blocks come back into use."""
        for block in blocks:
            if block.ref_count == 0:
                assert block.block_hash is not None, "a free block has no content to share"
                del self._cached[block.block_id]
            elif block.ref_count == 1:
                self._num_shared += 1
            block.ref_count += 1
        self._note_use()

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop a reference to each; without any left a block is cached if indexed, else free."""
        for block in blocks:
            assert block.ref_count > 0, "block freed twice"
            block.ref_count -= 1
            if block.ref_count > 0:
                self._num_shared -= block.ref_count == 1
            elif block.block_hash is not None:
                self._cached[block.block_id] = block
            else:
                self._free[block.block_id] = block

    def forget(self, block: Block) -> None:
        """Note that the index dropped a block by itself: a cached one becomes plain free."""
        assert block.block_hash is None
        if block.ref_count == 0:
            self._free[block.block_id] = self._cached.pop(block.block_id)

    def reset_cache(self) -> int:
        """Forget every cached block; returns how many there were."""
        count = len(self._cached)
        while self._cached:
            block_id, block = self._cached.popitem()
            self._index.remove(block)
            self._free[block_id] = block
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
            if self._cached.pop(block.block_id, None) is not None:
                self._index.remove(block)
            else:
                del self._free[block.block_id]
        return len(self._blocks)

    def check_integrity(self, table_counts: dict[int, int]) -> None:
        """Assert every invariant of the pool.

        Args:
            table_counts: Block id to the number of tables that hold it, for all live tables.
        """
        assert not self._free.keys() & self._cached.keys(), "a block is both free and cached"
        for block_id, block in (*self._free.items(), *self._cached.items()):
            assert self._blocks[block_id] is block, "an idle block has another's id"
        assert all(block.block_hash is None for block in self._free.values())
        assert all(block.block_hash is not None for block in self._cached.values())
        num_shared = sum(block.ref_count > 1 for block in self._blocks)
        assert num_shared == self._num_shared, "count of shared blocks is off"
        indexed = {entry.block.block_id: key for key, entry in self._index}
        assert len(indexed) == len(self._index), "two hashes name one block"
        for block_id, block in enumerate(self._blocks):
            assert block.block_id == block_id
            expected = table_counts.get(block_id, 0)
            assert block.ref_count == expected, f"{block} is held by {expected} tables"
            is_idle = block_id in self._free or block_id in self._cached
            assert (block.ref_count == 0) == is_idle, f"{block} is in two states"
            assert indexed.get(block_id) == block.block_hash, f"index is stale for {block}"
        assert all(block_id < len(self._blocks) for block_id in table_counts)

    def _note_use(self) -> None:
        used = self.num_used_blocks
        self.recent_used_blocks = max(self.recent_used_blocks, used)
        self.peak_used_blocks = max(self.peak_used_blocks, used)
