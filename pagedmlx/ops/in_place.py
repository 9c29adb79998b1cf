"""InPlaceWriter: changes pool arrays by kernels that store through their inputs."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.kv.layout import AxisOrder, KVLayout
from pagedmlx.kv.writer import LayerPool, NewRows, Rope
from pagedmlx.ops.launch import MIN_ELEMENTS, Launch, Launcher
from pagedmlx.ops.rope_write import RopeWriteVariant, heads_per_thread
from pagedmlx.ops.variants import COPY_THREADS, CopyVariant, PoolShape, WriteVariant

_NOWHERE = -1
_THREADS = 256


class InPlaceWriter:
    """See ``PoolWriter`` and ``RotatingWriter``; the pool's arrays never change their identity.

    Args:
        launcher: Runs the kernels.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launch = launcher
        self._slots: tuple[mx.array, mx.array] | None = None
        # By what is fixed in a kernel; nothing here may keep a pool, which may grow and be freed.
        self._variants: dict[tuple[object, ...], WriteVariant] = {}
        self._rope_variants: dict[tuple[object, ...], RopeWriteVariant] = {}
        self._copy_variants: dict[PoolShape, CopyVariant] = {}

    def first_token(self) -> mx.array:
        """See ``PoolWriter.first_token``."""
        return mx.zeros(MIN_ELEMENTS, mx.int32)

    def adopt(self, pool: LayerPool) -> LayerPool:
        """See ``PoolWriter.adopt``."""
        return replace(pool, views=(self._launch.view(pool.keys), self._launch.view(pool.values)))

    def write(
        self,
        pool: LayerPool,
        keys: mx.array,
        values: mx.array,
        slots: mx.array,
        token: mx.array | None,
    ) -> mx.array:
        """See ``PoolWriter.write``."""
        assert token is not None
        num_rows = keys.shape[0]
        variant = self._variant(pool, keys)
        threads = num_rows * variant.pool.num_kv_heads * variant.pool.row_vectors
        return self._launch(
            Launch(
                variant.kernel,
                [keys, values, *pool.bound, self._padded(slots), token],
                max(threads, MIN_ELEMENTS),
                _THREADS,
                [(MIN_ELEMENTS,)],
                [mx.int32],
            )
        )[0]

    def write_rotated(
        self, pool: LayerPool, rows: NewRows, rope: Rope, token: mx.array
    ) -> tuple[mx.array, mx.array]:
        """See ``RotatingWriter.write_rotated``."""
        num_rows, num_heads, _, head_dim = rows.queries.shape
        variant = self._rope_variant(pool, rows.queries, rope, heads_per_thread(num_rows))
        # Heads of a row lie side by side, whatever shape models give them.
        inputs = [each.reshape(num_rows, -1) for each in (rows.queries, rows.keys, rows.values)]
        inputs.append(rows.positions)
        if rope.freqs is not None:
            inputs.append(rope.freqs)
        inputs += [*pool.bound, self._padded(rows.slots), token]
        rotated, token = self._launch(
            Launch(
                variant.kernel,
                inputs,
                max(num_rows * variant.row_threads, MIN_ELEMENTS),
                _THREADS,
                [(num_rows, num_heads, head_dim), (MIN_ELEMENTS,)],
                [rows.queries.dtype, mx.int32],
            )
        )
        return rotated, token

    def copy_blocks(
        self,
        pools: list[LayerPool],
        src: npt.NDArray[np.int32],
        dst: npt.NDArray[np.int32],
        token: mx.array | None,
    ) -> mx.array:
        """See ``PoolWriter.copy_blocks``."""
        assert token is not None
        if np.isin(dst, src).any():
            return self._copy_through_buffers(pools, src, dst, token)
        pairs = np.full((max(len(src), MIN_ELEMENTS // 2), 2), _NOWHERE, dtype=np.int32)
        pairs[: len(src), 0] = src
        pairs[: len(src), 1] = dst
        uploaded = mx.array(pairs)
        for pool in pools:
            token = self._launch(
                Launch(
                    self._copies(pool).kernel,
                    [*pool.bound, uploaded, token],
                    len(pairs) * COPY_THREADS,
                    COPY_THREADS,
                    [(MIN_ELEMENTS,)],
                    [mx.int32],
                )
            )[0]
        return token

    def _copy_through_buffers(
        self,
        pools: list[LayerPool],
        src: npt.NDArray[np.int32],
        dst: npt.NDArray[np.int32],
        token: mx.array,
    ) -> mx.array:
        """Copies of which one reads a block that another writes."""
        sources = mx.array(src)
        for pool in pools:
            shape = pool_shape(pool)
            blocks = sources + token[:1]
            keys = _rows_of(pool.keys[blocks], shape.slot_major)
            values = _rows_of(pool.values[blocks], shape.slot_major)
            mx.eval(keys, values)
            slots = dst[:, None].astype(np.int64) * shape.block_size + np.arange(shape.block_size)
            token = self.write(pool, keys, values, mx.array(slots.ravel()), token)
        return token

    def _variant(self, pool: LayerPool, keys: mx.array) -> WriteVariant:
        k_shape, v_shape = pool.keys.shape[1:], pool.values.shape[1:]
        kind = (k_shape, v_shape, pool.keys.dtype, pool.order, keys.dtype)
        variant = self._variants.get(kind)
        if variant is None:
            variant = WriteVariant(pool_shape(pool), dtype_name(keys.dtype))
            self._variants[kind] = variant
        return variant

    def _rope_variant(
        self, pool: LayerPool, queries: mx.array, rope: Rope, heads: int
    ) -> RopeWriteVariant:
        k_shape, v_shape = pool.keys.shape[1:], pool.values.shape[1:]
        num_heads, dtype = queries.shape[1], queries.dtype
        kind = (k_shape, v_shape, pool.keys.dtype, pool.order, num_heads, dtype, rope, heads)
        variant = self._rope_variants.get(kind)
        if variant is None:
            shape = pool_shape(pool)
            factor = num_heads // shape.num_kv_heads
            variant = RopeWriteVariant(shape, dtype_name(dtype), factor, rope, heads)
            self._rope_variants[kind] = variant
        return variant

    def _copies(self, pool: LayerPool) -> CopyVariant:
        shape = pool_shape(pool)
        return self._copy_variants.setdefault(shape, CopyVariant(shape))

    def _padded(self, slots: mx.array) -> mx.array:
        """The slots with at least 8 elements; made once for all layers of a step."""
        if slots.size >= MIN_ELEMENTS:
            return slots
        if self._slots is None or self._slots[0] is not slots:
            padding = mx.full((MIN_ELEMENTS - slots.size,), _NOWHERE, slots.dtype)
            self._slots = (slots, mx.concatenate([slots, padding]))
        return self._slots[1]


def _rows_of(blocks: mx.array, slot_major: bool) -> mx.array:
    """Blocks as one row per slot: (blocks * block_size, heads, D)."""
    if not slot_major:
        blocks = blocks.swapaxes(1, 2)
    return blocks.reshape(-1, *blocks.shape[2:])


def pool_shape(pool: LayerPool) -> PoolShape:
    """The kernels' view of a layer's arrays."""
    slot_major = pool.order is AxisOrder.SLOT_MAJOR
    _, first, second, k_head_dim = pool.keys.shape
    num_kv_heads, block_size = (second, first) if slot_major else (first, second)
    return PoolShape(
        dtype_name(pool.keys.dtype),
        num_kv_heads,
        k_head_dim,
        pool.values.shape[-1],
        block_size,
        slot_major,
    )


def layer_shape(layout: KVLayout, layer: int) -> PoolShape:
    """The same from the pool's layout."""
    shape = layout.layers[layer]
    return PoolShape(
        layout.dtype,
        shape.num_kv_heads,
        shape.k_head_dim,
        shape.v_head_dim,
        layout.block_size,
        layout.order is AxisOrder.SLOT_MAJOR,
    )


def dtype_name(dtype: mx.Dtype) -> str:
    """An element type by name, as in ``KVLayout.dtype``."""
    return str(dtype).rpartition(".")[2]
