"""Block: the bookkeeping of one fixed-size piece of the pool; it holds no K or V itself."""

from __future__ import annotations

from dataclasses import dataclass

NO_BLOCK = -1
"""Stands in a table of block ids where there is none."""


@dataclass(eq=False, slots=True)
class Block:
    """One block of a pool.

    It is in exactly one of three states: *in use* (``ref_count`` > 0), *cached* (reference count
    0, ``block_hash`` set: its content is known and still indexed), *free* (neither).

    Attributes:
        block_id: Index into the pool's arrays.
        ref_count: Number of block tables that hold it.
        block_hash: Hash of the tokens up to and including this block, while it is indexed.
    """

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None

    def __repr__(self) -> str:
        cached = ", indexed" if self.block_hash is not None else ""
        return f"Block({self.block_id}, ref_count={self.ref_count}{cached})"
