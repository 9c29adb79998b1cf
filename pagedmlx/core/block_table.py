"""BlockTable: the logical-to-physical map of one sequence in one KV group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagedmlx.core.block import NO_BLOCK, Block
from pagedmlx.core.block_pool import BlockPool
from pagedmlx.core.prefix import PrefixEntry


class BlockTable:
    """Block i holds the tokens [i * block_size, (i + 1) * block_size) of its sequence.

    The table owns one reference to each block that it holds. Those that a window has passed are
    given back, and leave their places behind.

    Args:
        pool: Where its blocks come from and go back to.

    Attributes:
        num_passed: How many of the first places are empty.
        blocks: The blocks of the other places, in order.
        entries: Prefix entries of the first blocks, as far as their content has been indexed; an
            entry may name another block of equal content. None where a window passed before.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.num_passed = 0
        self.blocks: list[Block] = []
        self.entries: list[PrefixEntry | None] = []
        self._ids = np.empty(8, dtype=np.int32)

    def __len__(self) -> int:
        return self.num_passed + len(self.blocks)

    def __getitem__(self, index: int) -> Block:
        assert self.num_passed <= index, "a window has passed this block"
        return self.blocks[index - self.num_passed]

    def as_array(self, num_blocks: int | None = None) -> npt.NDArray[np.int32]:
        """Ids of the first ``num_blocks`` places (default all), as a copy; NO_BLOCK where empty."""
        count = len(self) if num_blocks is None else num_blocks
        assert count <= len(self)
        return self._ids[:count].copy()

    def append(self) -> Block:
        """Allocate one more block at the end."""
        block = self.pool.allocate()
        index = len(self)
        self._make_room(index + 1)
        self._ids[index] = block.block_id
        self.blocks.append(block)
        return block

    def share(self, blocks: Sequence[Block], num_passed: int = 0) -> None:
        """Append blocks that others hold or that are cached, adding a reference to each.

        Args:
            blocks: The blocks.
            num_passed: Empty places before them; only in an empty table.
        """
        assert not (num_passed and len(self))
        self.pool.share(blocks)
        start = len(self) + num_passed
        end = start + len(blocks)
        self._make_room(end)
        self._ids[:num_passed] = NO_BLOCK
        self._ids[start:end] = [block.block_id for block in blocks]
        self.num_passed += num_passed
        self.blocks.extend(blocks)

    def replace(self, index: int) -> tuple[Block, Block]:
        """Copy on write: put a new block in the place of one whose content others may want.

        Returns:
            The old block, whose content must be copied, and the new one.
        """
        old = self[index]
        assert old.ref_count > 1 or old.block_hash is not None, "nobody else wants its content"
        new = self.pool.allocate()
        self.blocks[index - self.num_passed] = new
        self._ids[index] = new.block_id
        self.pool.free([old])
        return old, new

    def pass_until(self, index: int) -> None:
        """Give back the blocks before a place, the first one first."""
        count = index - self.num_passed
        if count <= 0:
            return
        self.pool.free(self.blocks[:count])
        del self.blocks[:count]
        self._ids[self.num_passed : index] = NO_BLOCK
        self.num_passed = index

    def truncate(self, num_blocks: int) -> None:
        """Give back all blocks from a place on, the last one first."""
        assert num_blocks >= self.num_passed
        count = num_blocks - self.num_passed
        self.pool.free(reversed(self.blocks[count:]))
        del self.blocks[count:]
        del self.entries[num_blocks:]

    def release(self) -> None:
        """Give back every block, a chain's tail before its head."""
        self.truncate(self.num_passed)
        self.num_passed = 0
        self.entries.clear()

    def _make_room(self, num_blocks: int) -> None:
        """Have at least so many places in the array of ids, twice as many when it must grow."""
        room = len(self._ids)
        if num_blocks > room:
            more = np.empty(max(room, num_blocks - room), dtype=np.int32)
            self._ids = np.concatenate([self._ids, more])
