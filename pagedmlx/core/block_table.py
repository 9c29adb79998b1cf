"""BlockTable: the logical-to-physical map of one sequence in one KV group."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pagedmlx.core.block import Block
from pagedmlx.core.block_pool import BlockPool
from pagedmlx.core.prefix import PrefixEntry


class BlockTable:
    """Block i holds the tokens [i * block_size, (i + 1) * block_size) of its sequence.

    The table owns one reference to each of its blocks.

    Args:
        pool: Where its blocks come from and go back to.

    Attributes:
        blocks: The blocks in order.
        entries: Prefix entries of the first blocks, as far as their content has been indexed; an
            entry may name another block of equal content.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[Block] = []
        self.entries: list[PrefixEntry] = []
        self._ids = np.empty(8, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.blocks)

    def as_array(self, num_blocks: int | None = None) -> npt.NDArray[np.int32]:
        """Ids of the first ``num_blocks`` blocks (default all), as a copy."""
        count = len(self.blocks) if num_blocks is None else num_blocks
        assert count <= len(self.blocks)
        return self._ids[:count].copy()

    def append(self) -> Block:
        """Allocate one more block at the end."""
        block = self.pool.allocate()
        self._push(block)
        return block

    def share(self, blocks: Iterable[Block]) -> None:
        """Append blocks that others hold or that are cached, adding a reference to each."""
        for block in blocks:
            self.pool.share(block)
            self._push(block)

    def replace(self, index: int) -> tuple[Block, Block]:
        """Copy on write: put a new block in the place of one whose content others may want.

        Returns:
            The old block, whose content must be copied, and the new one.
        """
        old = self.blocks[index]
        assert old.ref_count > 1 or old.block_hash is not None, "nobody else wants its content"
        new = self.pool.allocate()
        self.blocks[index] = new
        self._ids[index] = new.block_id
        self.pool.free(old)
        return old, new

    def truncate(self, num_blocks: int) -> None:
        """Give back all blocks after the first ``num_blocks``, the last one first."""
        while len(self.blocks) > num_blocks:
            self.pool.free(self.blocks.pop())
        del self.entries[num_blocks:]

    def release(self) -> None:
        """Give back every block, a chain's tail before its head."""
        self.truncate(0)

    def _push(self, block: Block) -> None:
        count = len(self.blocks)
        if count == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[count] = block.block_id
        self.blocks.append(block)
