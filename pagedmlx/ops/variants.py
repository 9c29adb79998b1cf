"""The variants of the kernels: what is fixed in a text, and how it follows from a model's shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Protocol

from pagedmlx.kv.layout import DTYPE_BYTES
from pagedmlx.ops.launch import MAX_THREADGROUP_BYTES, SIMD_WIDTH, Kernel, Platform
from pagedmlx.ops.sources import read_source

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
BLOCK_SIZES = (2, 4, 8, 16, 32, 64)
MAX_ROWS = 8
"""Most rows of a sequence that the decode kernel takes."""
COPY_THREADS = 256
MATRIX_ROWS = 8
MAX_MATRIX_HEAD_DIM = 256
"""Larger accumulators don't fit in registers."""

LOG2_E = math.log2(math.e)
TYPE_NAMES = {"float16": "half", "bfloat16": "bfloat16_t", "float32": "float"}


@dataclass(frozen=True)
class PoolShape:
    """What every kernel knows of a layer's pool.

    Attributes:
        dtype: Type of its elements by name.
        num_kv_heads: K and V heads.
        k_head_dim: Elements of a K row; a multiple of 4.
        v_head_dim: Elements of a V row; a multiple of 4.
        block_size: Tokens in a block; a power of two.
        slot_major: Whether the axes are (block, slot, head, D).
    """

    dtype: str
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    block_size: int
    slot_major: bool = False

    def constants(self) -> dict[str, int | str]:
        """What the texts call these."""
        return {
            "KT": TYPE_NAMES[self.dtype],
            "H": self.num_kv_heads,
            "DK": self.k_head_dim,
            "DV": self.v_head_dim,
            "BS": self.block_size,
            "SLOT_MAJOR": int(self.slot_major),
        }

    @property
    def row_vectors(self) -> int:
        """Threads that one row of one head takes at 4 elements each."""
        return max(self.k_head_dim, self.v_head_dim) // 4


@dataclass(frozen=True)
class WriteVariant:
    """``write.metal`` for rows of one type into one pool."""

    pool: PoolShape
    dtype: str

    @cached_property
    def kernel(self) -> Kernel:
        """The text with these constants."""
        return make_kernel(
            "write",
            {"T": TYPE_NAMES[self.dtype]} | self.pool.constants(),
            ("keys", "values", "k_pool", "v_pool", "slots", "token"),
            ("written",),
        )


@dataclass(frozen=True)
class CopyVariant:
    """``copy_blocks.metal`` for one pool."""

    pool: PoolShape

    @cached_property
    def kernel(self) -> Kernel:
        """The text with these constants."""
        pool = self.pool
        rows = pool.num_kv_heads * pool.block_size
        return make_kernel(
            "copy_blocks",
            {
                "KT": TYPE_NAMES[pool.dtype],
                "K_BLOCK": rows * pool.k_head_dim,
                "V_BLOCK": rows * pool.v_head_dim,
                "COPY_THREADS": COPY_THREADS,
            },
            ("k_pool", "v_pool", "pairs", "token"),
            ("written",),
        )


@dataclass(frozen=True)
class GatherVariant:
    """``gather.metal`` for one pool and queries of one type."""

    pool: PoolShape
    dtype: str

    @cached_property
    def kernel(self) -> Kernel:
        """The text with these constants."""
        return make_kernel(
            "gather",
            {"T": TYPE_NAMES[self.dtype]} | self.pool.constants(),
            ("k_scratch", "v_scratch", "queries", "k_pool", "v_pool", "plan", "token"),
            ("passed",),
        )


class DecodePath(StrEnum):
    """How the decode kernel multiplies."""

    AUTO = "auto"
    LANES = "lanes"
    MATRICES = "matrices"


@dataclass(frozen=True)
class DecodeVariant:
    """``decode.metal`` for one pool and one kind of attention layer, or ``decode_matrix.metal``.

    Attributes:
        pool: The pool.
        dtype: Type of queries and output by name.
        factor: Query heads that share a KV head.
        rows: Most rows of a sequence: 1, 2, 4 or 8.
        split: Whether sequences are cut in chunks, whose results ``merge.metal`` merges.
        sinks: Whether attention sinks take part.
        scale: Factor on q.k.
        softcap: As in ``AttentionParams``.
        num_simdgroups: SIMD-groups of a threadgroup.
        writes: Whether the kernel also writes the rows' K and V.
        matrices: Whether it is ``decode_matrix.metal``, for what ``suits_matrices``.
    """

    pool: PoolShape
    dtype: str
    factor: int
    rows: int = 1
    split: bool = False
    sinks: bool = False
    scale: float = 1.0
    softcap: float | None = None
    num_simdgroups: int = 4
    writes: bool = False
    matrices: bool = False

    @property
    def suits_matrices(self) -> bool:
        """Whether matrices can serve it, and more of their columns hold a query vector than not."""
        pool = self.pool
        dims = (pool.k_head_dim, pool.v_head_dim)
        return (
            self.rows * self.factor > MATRIX_ROWS // 2
            and self.dtype == pool.dtype != "float32"
            and all(dim % 16 == 0 and dim <= MAX_MATRIX_HEAD_DIM for dim in dims)
            and pool.block_size >= MATRIX_ROWS
        )

    @cached_property
    def heads_per_group(self) -> int:
        """Query vectors that a threadgroup holds in registers; a power of two."""
        if self.matrices:
            return MATRIX_ROWS
        per_lane = _per_lane(self.pool.k_head_dim) + _per_lane(self.pool.v_head_dim)
        most = 1
        while most < 8 and 2 * most * per_lane <= 64:
            most *= 2
        wanted = 1
        while wanted < self.rows * self.factor:
            wanted *= 2
        return min(most, wanted)

    @cached_property
    def parts(self) -> int:
        """Threadgroups that share the query vectors of a KV head."""
        return self.parts_for(self.rows)

    def parts_for(self, num_rows: int) -> int:
        """Those of them that have something to do for a sequence of so many rows."""
        return -(-num_rows * self.factor // self.heads_per_group)

    @cached_property
    def tile(self) -> int:
        """Tokens that a SIMD-group loads before it uses them; a power of two."""
        if self.matrices:
            # What the 128 registers of a thread have room for, on Apple's GPUs.
            return 16 if max(self.pool.k_head_dim, self.pool.v_head_dim) <= 96 else 8
        per_token = _per_lane(self.pool.k_head_dim) + _per_lane(self.pool.v_head_dim)
        words = max(1, per_token * DTYPE_BYTES[self.pool.dtype] // 4)
        tile = 2
        while tile < 8 and 2 * tile * self.heads_per_group <= SIMD_WIDTH and 2 * tile * words <= 32:
            tile *= 2
        return tile

    @property
    def needed_bytes(self) -> int:
        """Threadgroup memory."""
        per_simdgroup = 4 * self.heads_per_group * (self.pool.v_head_dim + 2)
        return self.num_simdgroups * per_simdgroup

    @property
    def vectors(self) -> int:
        """Query vectors of a KV head, those that fill up the last threadgroup included."""
        return self.parts * self.heads_per_group

    @cached_property
    def kernel(self) -> Kernel:
        """The text with these constants."""
        scale = self.scale * LOG2_E if self.softcap is None else self.scale / self.softcap
        sinks = self.sinks and not self.split
        constants = self.pool.constants() | {
            "T": TYPE_NAMES[self.dtype],
            "FACTOR": self.factor,
            "ROWS": self.rows,
            "GH": self.heads_per_group,
            "PARTS": self.parts,
            "SIMDGROUPS": self.num_simdgroups,
            **self._tile_constants,
            "SPLIT": int(self.split),
            "WRITES": int(self.writes),
            "HAS_SINKS": int(sinks),
            "HAS_SOFTCAP": int(self.softcap is not None),
            "QUERY_SCALE": scale,
            "SOFTCAP": (self.softcap or 0.0) * LOG2_E,
        }
        body = "decode_matrix" if self.matrices else "decode"
        kernel = make_kernel(
            body,
            constants,
            (
                *("queries", "k_pool", "v_pool", "plan"),
                *(("sinks",) if sinks else ()),
                "token",
                *(("keys", "values") if self.writes else ()),
            ),
            (
                *(("partials", "stats") if self.split else ("out",)),
                *(("written",) if self.writes else ()),
            ),
            threadgroup_bytes=self.needed_bytes,
            parts=("decode_begin.h", f"{body}.metal", "decode_end.h"),
        )
        return with_matrices(kernel) if self.matrices else replace(kernel, headers=("lanes.h",))

    @property
    def _tile_constants(self) -> dict[str, int]:
        dims = (self.pool.k_head_dim, self.pool.v_head_dim)
        if self.matrices:
            return {"KEYS": self.tile, "W": matrix_load_width(*dims)}
        k_width, v_width = map(_load_width, dims)
        return {"U": self.tile, "KW": k_width, "VW": v_width}


@dataclass(frozen=True)
class MergeVariant:
    """``merge.metal`` for what a kernel leaves that cuts tokens in chunks.

    Attributes:
        pool: The pool.
        dtype: Type of the output by name.
        factor: Query heads that share a KV head.
        vectors: Query vectors of an item of that kernel.
        sinks: Whether attention sinks take part.
        num_simdgroups: SIMD-groups of a threadgroup; more for many chunks.
        shared_vectors: Query vectors of an item of a cascade's shared part; 0 without one.
    """

    pool: PoolShape
    dtype: str
    factor: int
    vectors: int
    sinks: bool = False
    num_simdgroups: int = 1
    shared_vectors: int = 0

    @cached_property
    def kernel(self) -> Kernel:
        """The text with these constants."""
        constants = {
            "T": TYPE_NAMES[self.dtype],
            "H": self.pool.num_kv_heads,
            "FACTOR": self.factor,
            "DV": self.pool.v_head_dim,
            "VECTORS": self.vectors,
            "SIMDGROUPS": self.num_simdgroups,
            "HAS_SINKS": int(self.sinks),
            "SHARED": self.shared_vectors,
        }
        return make_kernel(
            "merge",
            constants,
            (
                *("partials", "stats", "plan"),
                *(("sinks",) if self.sinks else ()),
                *(("shared_partials", "shared_stats") if self.shared_vectors else ()),
            ),
            ("out",),
            threadgroup_bytes=self._threadgroup_bytes,
        )

    @property
    def _threadgroup_bytes(self) -> int:
        several = self.num_simdgroups > 1
        return 4 * self.num_simdgroups * self.pool.v_head_dim if several else 0


MANY_CHUNKS = 16
"""With more chunks of a row, one SIMD-group merges too slowly."""
_MERGE_SIMDGROUPS = 8


class PartialResults(Protocol):
    """A variant of a kernel that leaves partial results."""

    @property
    def pool(self) -> PoolShape:
        """The pool."""
        ...

    @property
    def dtype(self) -> str:
        """Type of the output by name."""
        ...

    @property
    def factor(self) -> int:
        """Query heads that share a KV head."""
        ...

    @property
    def vectors(self) -> int:
        """Query vectors of an item."""
        ...

    @property
    def sinks(self) -> bool:
        """Whether attention sinks take part."""
        ...


@lru_cache
def merge_variant(kernel: PartialResults, *, many: bool, shared_vectors: int = 0) -> MergeVariant:
    """The one object for equal variants, so that texts are put together once.

    Args:
        kernel: Leaves what is merged.
        many: Whether some row has more than ``MANY_CHUNKS``.
        shared_vectors: As in ``MergeVariant``.
    """
    return MergeVariant(
        kernel.pool,
        kernel.dtype,
        kernel.factor,
        kernel.vectors,
        kernel.sinks,
        _MERGE_SIMDGROUPS if many else 1,
        shared_vectors,
    )


def decode_by(path: DecodePath, variant: DecodeVariant, platform: Platform) -> DecodeVariant:
    """The variant that multiplies as wanted, or by lanes where matrices can't serve it.

    By itself it is by matrices where that was measured to be faster: on CUDA, with matrices full
    of query heads. On Metal nobody has measured it yet.
    """
    if path is DecodePath.AUTO:
        full = variant.factor % MATRIX_ROWS == 0
        path = DecodePath.MATRICES if full and platform is Platform.CUDA else DecodePath.LANES
    if path is DecodePath.LANES or not variant.suits_matrices:
        return variant
    variant = replace(variant, matrices=True)
    while variant.needed_bytes > MAX_THREADGROUP_BYTES:
        variant = replace(variant, num_simdgroups=variant.num_simdgroups // 2)
    return variant


def matrix_load_width(k_head_dim: int, v_head_dim: int) -> int:
    """Elements of one load; the 8 loads of a span must fit in a row without a rest."""
    return 2 if k_head_dim % 32 or v_head_dim % 32 else 4


def _load_width(head_dim: int) -> int:
    """Elements of one load: 4, or 2 where that keeps all 32 lanes busy and 4 doesn't."""
    return 2 if head_dim % 128 and head_dim % 64 == 0 else 4


def _per_lane(head_dim: int) -> int:
    width = _load_width(head_dim)
    return width * -(-head_dim // (SIMD_WIDTH * width))


def make_kernel(
    body: str,
    constants: Mapping[str, int | float | str],
    input_names: tuple[str, ...],
    output_names: tuple[str, ...],
    threadgroup_bytes: int = 0,
    parts: tuple[str, ...] = (),
) -> Kernel:
    """A file of the kernels' folder as a kernel, its constants written before it.

    Args:
        body: The file's name without its suffix.
        constants: Numbers and, as strings, types by what the text calls them.
        input_names: As in ``Kernel``.
        output_names: Likewise.
        threadgroup_bytes: Likewise.
        parts: The files that the text is made of, where it is more than that one.
    """
    # Plain definitions, and no template arguments: those MLX would put together at every call.
    lines = [_definition(name, value) for name, value in constants.items()]
    values = "_".join(str(value) for value in constants.values())
    name = f"paged_{body}_{values}"
    return Kernel(
        name="".join(character if character.isalnum() else "_" for character in name),
        source="\n" + "\n".join([*lines, *map(read_source, parts or (f"{body}.metal",))]),
        input_names=input_names,
        output_names=output_names,
        threadgroup_bytes=threadgroup_bytes,
    )


def with_matrices(kernel: Kernel) -> Kernel:
    """A kernel that multiplies matrices, with what it needs before its text."""
    return replace(kernel, headers=("matrix.h",), cuda_headers=("cuda_matrix.h",))


def _definition(name: str, value: int | float | str) -> str:
    if isinstance(value, str):
        return f"typedef {value} {name};"
    if isinstance(value, float):
        return f"constexpr float {name} = {value!r}f;"
    # The preprocessor asks for some of them.
    return f"#define {name} {value}"
