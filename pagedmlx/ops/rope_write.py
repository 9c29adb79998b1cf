"""RopeWriteVariant: the kernel that rotates queries and keys and writes K and V, in one launch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from pagedmlx.kv.writer import Rope
from pagedmlx.ops.launch import Kernel
from pagedmlx.ops.variants import TYPE_NAMES, PoolShape, make_kernel

_MANY_ROWS = 64
_HEADS_OF_MANY = 4
"""With few rows it's the time of a single thread that counts, with many the work of all."""


def heads_per_thread(num_rows: int) -> int:
    """Heads for which a thread uses one sine and cosine; by measurement on an H200."""
    return 1 if num_rows <= _MANY_ROWS else _HEADS_OF_MANY


@dataclass(frozen=True)
class RopeWriteVariant:
    """``rope_write.metal`` for one pool and one kind of attention layer.

    Attributes:
        pool: The pool.
        dtype: Type of queries, keys and values by name.
        factor: Query heads that share a KV head.
        rope: How they are rotated; two that differ in wavelengths alone are equal.
        heads: Heads that a thread takes.
    """

    pool: PoolShape
    dtype: str
    factor: int
    rope: Rope
    heads: int

    @property
    def row_threads(self) -> int:
        """Threads that one row takes."""
        num_heads = self.pool.num_kv_heads * (1 + self.factor)
        return -(-num_heads // self.heads) * 2 * self.pool.row_vectors

    @cached_property
    def kernel(self) -> Kernel:
        """The text with these constants."""
        rope = self.rope
        constants = self.pool.constants() | {
            "T": TYPE_NAMES[self.dtype],
            "FACTOR": self.factor,
            "HEADS": self.heads,
            "DIMS": rope.dims,
            "TRADITIONAL": int(rope.traditional),
            "HAS_FREQS": int(rope.base is None),
            "LOG_BASE": 0.0 if rope.base is None else math.log2(rope.base),
            "SCALE": float(rope.scale),
        }
        kernel = make_kernel(
            "rope_write",
            constants,
            (
                *("queries", "keys", "values", "positions"),
                *(("freqs",) if rope.base is None else ()),
                *("k_pool", "v_pool", "slots", "token"),
            ),
            ("rotated", "written"),
        )
        return replace(kernel, strided=True)
