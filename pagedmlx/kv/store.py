"""KVStore: the one owner of the pool's arrays, and the only code that writes or reads them.

Which blocks a sequence holds is the core's business; how they are attended to is ``ops``'.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.core.batch import NO_BLOCK, GroupArrays
from pagedmlx.core.groups import KVGroupKind
from pagedmlx.kv.layout import AxisOrder, KVLayout


class KVStore:
    """One K and one V array for each layer, written by functional update.

    An update runs in place only while the store holds the sole reference to the array and no
    read of it is in flight, else MLX copies the whole array. So nothing outside this class may
    keep a pool array or a pending read of one past ``commit``, and no name in here may outlive
    the statement that replaces the array.

    Args:
        layout: Shapes, element type and axis order.
        num_blocks: Blocks in the pool of each KV group.
        fill: Value that every element starts with.
    """

    def __init__(self, layout: KVLayout, num_blocks: tuple[int, ...], fill: float = 0.0) -> None:
        assert len(num_blocks) == len(layout.groups)
        self.layout = layout
        self.num_blocks = num_blocks
        self.dtype: mx.Dtype = getattr(mx, layout.dtype)
        self._keys: dict[int, mx.array] = {}
        self._values: dict[int, mx.array] = {}
        for group, count in zip(layout.groups, num_blocks, strict=True):
            # A recurrent state is no K and V; it lives elsewhere.
            for layer in group.layers if group.kind is not KVGroupKind.STATE else ():
                self._keys[layer] = mx.full(layout.k_shape(layer, count), fill, self.dtype)
                self._values[layer] = mx.full(layout.v_shape(layer, count), fill, self.dtype)
        self.commit()

    def write(self, layer: int, keys: mx.array, values: mx.array, slots: mx.array) -> None:
        """Store one K and one V row per token; reads that are asked for later see them.

        Args:
            layer: The layer that they belong to.
            keys: (T, num_kv_heads, k_head_dim).
            values: (T, num_kv_heads, v_head_dim).
            slots: (T,) int64, all distinct and within the pool; see ``check``.
        """
        blocks, offsets = slots // self.layout.block_size, slots % self.layout.block_size
        for pool, rows in ((self._keys, keys), (self._values, values)):
            if self.layout.order is AxisOrder.HEAD_MAJOR:
                pool[layer][blocks, :, offsets] = rows.astype(self.dtype)
            else:
                pool[layer][blocks, offsets] = rows.astype(self.dtype)

    def copy_blocks(
        self, group: int, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32]
    ) -> None:
        """Copy whole blocks in every layer of a group, as if all at once.

        Args:
            group: The KV group.
            src: (C,) block ids to copy from.
            dst: (C,) block ids to copy to, all distinct.

        Raises:
            IndexError: An id is outside the pool.
            ValueError: ``dst`` names a block twice, or the two differ in length.
        """
        if len(src) != len(dst):
            raise ValueError(f"{len(src)} blocks to copy from, {len(dst)} to copy to")
        if len(src) == 0:
            return
        _check_range("block", src, self.num_blocks[group])
        _check_range("block", dst, self.num_blocks[group])
        _check_distinct("block", dst)
        layers = self.layout.groups[group].layers
        sources, targets = mx.array(src), mx.array(dst)
        for pool in (self._keys, self._values):
            buffers = [pool[layer][sources] for layer in layers]
            # A pending read of the array would make the update copy all of it.
            mx.eval(buffers)
            for layer, buffer in zip(layers, buffers, strict=True):
                pool[layer][targets] = buffer

    def gather(self, layer: int, block_tables: mx.array) -> tuple[mx.array, mx.array]:
        """Read blocks in the order of their tables; lazy, so free when unused.

        Slots that hold no live token come as they are, NaN included.

        Args:
            layer: The layer to read.
            block_tables: (S, B) int32; valid block ids only.

        Returns:
            K (S, num_kv_heads, B * block_size, k_head_dim) and V likewise, in the pool's type.
        """
        order = self.layout.order
        return (
            _gather_blocks(self._keys[layer], block_tables, order),
            _gather_blocks(self._values[layer], block_tables, order),
        )

    def gather_slots(self, layer: int, slots: mx.array) -> tuple[mx.array, mx.array]:
        """Read single slots, in any order and as often as named; lazy, like ``gather``.

        Args:
            layer: The layer to read.
            slots: (S, N) int64, all within the pool.

        Returns:
            K (S, num_kv_heads, N, k_head_dim) and V likewise, in the pool's type.
        """
        block_size = self.layout.block_size
        num_heads = self.layout.layers[layer].num_kv_heads
        heads = mx.arange(num_heads, dtype=slots.dtype)[:, None]
        if self.layout.order is AxisOrder.HEAD_MAJOR:
            blocks, offsets = slots // block_size, slots % block_size
            rows = (blocks * (num_heads * block_size) + offsets)[:, None] + heads * block_size
        else:
            rows = (slots * num_heads)[:, None] + heads
        return _gather_rows(self._keys[layer], rows), _gather_rows(self._values[layer], rows)

    def commit(self, *outputs: mx.array) -> None:
        """Evaluate a step's outputs together with every pending write, and wait for both.

        After this no read is in flight, so the next writes run in place.
        """
        mx.eval(*outputs, *self._keys.values(), *self._values.values())
        mx.synchronize()

    def check(self, group: int, arrays: GroupArrays) -> None:
        """Check a step's ids on the host: MLX reads and writes out of bounds without a word.

        Args:
            group: The KV group.
            arrays: Its part of the step.

        Raises:
            IndexError: A slot or block id is outside the pool.
            ValueError: A slot is named twice.
        """
        num_blocks = self.num_blocks[group]
        slots, block_ids = arrays.slot_mapping, arrays.block_tables
        _check_range("slot", slots, num_blocks * self.layout.block_size)
        _check_distinct("slot", slots)
        _check_range("block", block_ids[block_ids != NO_BLOCK], num_blocks)


def _gather_blocks(pool: mx.array, block_tables: mx.array, order: AxisOrder) -> mx.array:
    num_seqs, width = block_tables.shape
    if order is AxisOrder.SLOT_MAJOR:
        _, block_size, num_heads, head_dim = pool.shape
        rows = pool[block_tables].reshape(num_seqs, width * block_size, num_heads, head_dim)
        return rows.swapaxes(1, 2)
    num_blocks, num_heads, block_size, head_dim = pool.shape
    # One index for each (block, head) leaves the result contiguous in the order wanted.
    runs = block_tables[:, None, :] * num_heads + mx.arange(num_heads)[None, :, None]
    blocks = pool.reshape(num_blocks * num_heads, block_size, head_dim)[runs]
    return blocks.reshape(num_seqs, num_heads, width * block_size, head_dim)


def _gather_rows(pool: mx.array, rows: mx.array) -> mx.array:
    return pool.reshape(-1, pool.shape[-1])[rows]


def _check_range(what: str, ids: npt.NDArray[np.integer], limit: int) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < limit):
        raise IndexError(f"{what} ids {ids.min()} to {ids.max()} must be within [0, {limit})")


def _check_distinct(what: str, ids: npt.NDArray[np.integer]) -> None:
    if np.unique(ids).size != ids.size:
        raise ValueError(f"a {what} is named twice among {ids.size}")
