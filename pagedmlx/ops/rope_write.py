"""RopeWriteVariant: the kernel that rotates queries and keys and writes K and V, in one launch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from pagedmlx.kv.writer import Rope
from pagedmlx.ops.launch import Kernel
from pagedmlx.ops.variants import TYPE_NAMES, PoolShape, make_kernel

_HEADS = 4
"""Heads for which a thread uses one sine and cosine."""


@dataclass(frozen=True)
class RopeWriteVariant:
    """``rope_write.metal`` for one pool and one kind of attention layer.

    Attributes:
        pool: The pool.
        dtype: Type of queries, keys and values by name.
        factor: Query heads that share a KV head.
        rope: How they are rotated; two that differ in wavelengths alone are equal.
    """

    pool: PoolShape
    dtype: str
    factor: int
    rope: Rope

    @property
    def row_threads(self) -> int:
        """Threads that one row takes."""
        return -(-self.pool.num_kv_heads * (1 + self.factor) // _HEADS) * 2 * self.pool.row_vectors

    @cached_property
    def kernel(self) -> Kernel:
        """The text with these constants."""
        rope = self.rope
        constants = self.pool.constants() | {
            "T": TYPE_NAMES[self.dtype],
            "FACTOR": self.factor,
            "HEADS": _HEADS,
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
