"""Attention of prefill chunks by ``prefill.metal``: its variants and its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import BatchArrays
from pagedmlx.kv.layout import DTYPE_BYTES
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import AttentionParams
from pagedmlx.ops.launch import (
    MAX_THREADGROUP_BYTES,
    SIMD_WIDTH,
    Kernel,
    Launch,
    Launcher,
)
from pagedmlx.ops.variants import (
    LOG2_E,
    MAX_MATRIX_HEAD_DIM,
    TYPE_NAMES,
    DecodeVariant,
    PoolShape,
    make_kernel,
    matrix_load_width,
    with_matrices,
)
from pagedmlx.ops.worklist import HEADER, ITEM, UNLIMITED

MAX_WORK = 1 << 36
"""Multiplications of one launch: a tenth of a second on an M1, far from Metal's watchdog."""

_NUM_SIMDGROUPS = 4
_MAX_WIDE_HEAD_DIM = 128
# Rows that are never cut apart. Their vectors fill threadgroups whatever the group's size is.
_ROWS = 32
_BANK_BYTES = 128
"""Of threadgroup memory, that lanes read at once, as far as is known."""


@dataclass(frozen=True)
class PrefillVariant:
    """``prefill.metal`` for one pool and one kind of attention layer; see ``DecodeVariant``.

    Where ``split``, tokens are cut in chunks, whose results ``merge.metal`` merges; see ``runs``.
    A SIMD-group attends 8 vectors for each of its ``columns``; with 2, K and V are read half as
    often. Tiles have at most ``max_tile_bytes``.
    """

    pool: PoolShape
    dtype: str
    factor: int
    sinks: bool = False
    scale: float = 1.0
    softcap: float | None = None
    split: bool = False
    columns: int = 1
    max_tile_bytes: int = MAX_THREADGROUP_BYTES

    @property
    def is_supported(self) -> bool:
        """Whether the kernel can serve it."""
        dims = (self.pool.k_head_dim, self.pool.v_head_dim)
        return all(dim % 16 == 0 and dim <= MAX_MATRIX_HEAD_DIM for dim in dims)

    @property
    def vectors(self) -> int:
        """Query vectors of a threadgroup."""
        return 8 * self.columns * _NUM_SIMDGROUPS

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return _NUM_SIMDGROUPS * SIMD_WIDTH

    @cached_property
    def load_width(self) -> int:
        """Elements of one load."""
        return matrix_load_width(self.pool.k_head_dim, self.pool.v_head_dim)

    @cached_property
    def k_padding(self) -> int:
        """Loads between rows of K in threadgroup memory.

        Four lanes read a span of a row side by side, other lanes that span of the rows below; in
        128 bytes each has a bank of its own.
        """
        width = self.load_width * DTYPE_BYTES[self.pool.dtype]
        apart = 8 * width if 8 * width < _BANK_BYTES else 16
        return -(self.pool.k_head_dim * width // self.load_width - apart) % _BANK_BYTES // width

    @cached_property
    def v_padding(self) -> int:
        """Likewise of V, of which lanes side by side read two rows: 16 bytes."""
        return 16 // (self.load_width * DTYPE_BYTES[self.pool.dtype])

    @cached_property
    def keys(self) -> int:
        """Tokens of a tile."""
        keys = 32 * self.columns if max(self.pool.k_head_dim, self.pool.v_head_dim) < 192 else 16
        while self._tile_bytes(keys) > self.max_tile_bytes:
            keys //= 2
        return keys

    @cached_property
    def splitting(self) -> PrefillVariant:
        """The same in chunks; one object, so that its text is put together once."""
        return replace(self, sinks=False, split=True)

    @cached_property
    def kernel(self) -> Kernel:
        """The text with these constants."""
        scale = self.scale * LOG2_E if self.softcap is None else self.scale / self.softcap
        constants = self.pool.constants() | {
            "T": TYPE_NAMES[self.dtype],
            "FACTOR": self.factor,
            "SIMDGROUPS": _NUM_SIMDGROUPS,
            "COLUMNS": self.columns,
            "KEYS": self.keys,
            "W": self.load_width,
            "K_PAD": self.k_padding,
            "V_PAD": self.v_padding,
            "SPLIT": int(self.split),
            "HAS_SINKS": int(self.sinks),
            "HAS_SOFTCAP": int(self.softcap is not None),
            "QUERY_SCALE": scale,
            "SOFTCAP": (self.softcap or 0.0) * LOG2_E,
        }
        kernel = make_kernel(
            "prefill",
            constants,
            ("queries", "k_pool", "v_pool", "plan", *(("sinks",) if self.sinks else ()), "token"),
            ("partials", "stats") if self.split else ("out",),
            threadgroup_bytes=self._tile_bytes(self.keys),
        )
        return with_matrices(kernel)

    def _tile_bytes(self, keys: int) -> int:
        padding = (self.k_padding + self.v_padding) * self.load_width
        rows = self.pool.k_head_dim + self.pool.v_head_dim + padding
        return keys * rows * DTYPE_BYTES[self.pool.dtype]


def prefill_variant(
    layer: DecodeVariant, columns: int = 1, max_tile_bytes: int = MAX_THREADGROUP_BYTES
) -> PrefillVariant:
    """The prefill of the layers that a decode variant serves.

    Args:
        layer: The decode variant.
        columns: Of the prefill, where registers have room and a piece has vectors for so many.
        max_tile_bytes: Threadgroup memory that there is.
    """
    pool = layer.pool
    has_room = max(pool.k_head_dim, pool.v_head_dim) <= _MAX_WIDE_HEAD_DIM and layer.factor > 1
    return PrefillVariant(
        pool,
        layer.dtype,
        layer.factor,
        layer.sinks,
        layer.scale,
        layer.softcap,
        columns=columns if has_room else 1,
        max_tile_bytes=max_tile_bytes,
    )


@dataclass(frozen=True, slots=True)
class Prefill:
    """One launch: rows that follow each other, of one sequence or several.

    Attributes:
        plan: As ``prefill.metal`` reads it.
        num_items: Work items in it.
        num_rows: Rows that it attends.
        variant: The kernel.
    """

    plan: mx.array
    num_items: int
    num_rows: int
    variant: PrefillVariant


def plan_prefill(
    host: BatchArrays,
    sequences: Sequence[int] | np.ndarray,
    group: int,
    window: int | None,
    variant: PrefillVariant,
    max_work: int = MAX_WORK,
) -> list[Prefill]:
    """Cut the rows of some sequences of a step into launches, and those into tiles.

    Args:
        host: The step.
        sequences: Which sequences; their rows come in this order.
        group: The KV group.
        window: Tokens that a row sees; None is all.
        variant: The kernel.
        max_work: About the most multiplications of one launch; 32 rows stay together always.

    Returns:
        The launches; each takes up where the one before ends.
    """
    ends = host.context_lens[sequences].astype(np.int64)
    counts = np.diff(host.query_start_loc)[sequences]
    tables = np.maximum(host.groups[group].block_tables[sequences], 0)

    # Pieces of up to _ROWS rows, each of one sequence.
    num_pieces = -(-counts // _ROWS)
    owners = np.repeat(np.arange(len(counts)), num_pieces)
    index = np.arange(len(owners)) - (np.cumsum(num_pieces) - num_pieces)[owners]
    rows = np.minimum(counts[owners] - index * _ROWS, _ROWS)
    piece_ends = (ends - counts)[owners] + index * _ROWS + rows
    seen = piece_ends if window is None else np.minimum(piece_ends, window + rows)
    pool = variant.pool
    heads = pool.num_kv_heads * variant.factor
    work = rows * seen * (heads * (pool.k_head_dim + pool.v_head_dim))
    launches = (np.cumsum(work) - work) // max_work

    prefills = []
    for launch in np.unique(launches):
        chosen = np.flatnonzero(launches == launch)
        plan, num_items = _make_plan(
            rows[chosen],
            piece_ends[chosen],
            owners[chosen] - owners[chosen[0]],
            tables[owners[chosen[0]] : owners[chosen[-1]] + 1],
            window,
            variant,
        )
        prefills.append(Prefill(mx.array(plan), num_items, int(rows[chosen].sum()), variant))
    return prefills


def _make_plan(
    rows: np.ndarray,
    ends: np.ndarray,
    owners: np.ndarray,
    tables: np.ndarray,
    window: int | None,
    variant: PrefillVariant,
) -> tuple[np.ndarray, int]:
    """The plan of a launch for pieces with these rows, positions and rows of the tables."""
    num_tiles = -(-rows * variant.factor // variant.vectors)
    pieces = np.repeat(np.arange(len(rows)), num_tiles)
    first_tiles = np.cumsum(num_tiles) - num_tiles
    first_vectors = (np.arange(len(pieces)) - first_tiles[pieces]) * variant.vectors
    # The longest run first: a short one at the end keeps fewer cores waiting.
    pieces, first_vectors = (
        a[np.argsort(-ends[pieces], kind="stable")] for a in (pieces, first_vectors)
    )

    tables_at = HEADER + ITEM * len(pieces)
    plan = np.zeros(tables_at + tables.size, dtype=np.int32)
    plan[:2] = len(pieces), UNLIMITED if window is None else window
    items = plan[HEADER:tables_at].reshape(-1, ITEM)
    items[:, 0] = (np.cumsum(rows) - rows)[pieces]
    items[:, 1] = rows[pieces]
    items[:, 2] = ends[pieces]
    items[:, 3] = tables_at + owners[pieces] * tables.shape[1]
    items[:, 4] = first_vectors
    plan[tables_at:] = tables.ravel()
    return plan, len(pieces)


def attend_prefill(
    launcher: Launcher,
    queries: mx.array,
    layer: int,
    store: KVStore,
    prefill: Prefill,
    params: AttentionParams,
) -> mx.array:
    """Attend the rows of a launch.

    Args:
        launcher: Runs the kernel.
        queries: (L, num_heads, k_head_dim), row-contiguous or copied.
        layer: The layer whose K and V are read.
        store: Owner of the pool.
        prefill: From ``plan_prefill``.
        params: The layer's settings.

    Returns:
        (L, num_heads, v_head_dim) in the type of ``queries``.
    """
    pool, token = store.bind(layer)
    sinks = [] if params.sinks is None else [params.sinks]
    variant = prefill.variant
    return launcher(
        Launch(
            variant.kernel,
            [queries, *pool.bound, prefill.plan, *sinks, token],
            prefill.num_items * variant.pool.num_kv_heads * variant.threads,
            variant.threads,
            [(prefill.num_rows, queries.shape[1], variant.pool.v_head_dim)],
            [queries.dtype],
        )
    )[0]
