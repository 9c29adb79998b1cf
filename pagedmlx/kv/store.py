"""KVStore: the one owner of the pool's arrays and of the order in which they are written and read.

Which blocks a sequence holds is the core's business; how they are attended to is ``ops``'.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.core.batch import NO_BLOCK, GroupArrays
from pagedmlx.kv.layout import AxisOrder, KVLayout
from pagedmlx.kv.resize import set_length
from pagedmlx.kv.states import StateStore
from pagedmlx.kv.writer import (
    FunctionalWriter,
    LayerPool,
    NewRows,
    PoolWriter,
    Rope,
    RotatingWriter,
    Rotation,
)

RESIZE_BYTES = 256 << 20
"""Resizing may take so much even where the pool takes all of its memory: no step does meanwhile."""


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Rows that belong into a layer's pool and are not there yet; see ``KVStore.write``."""

    layer: int
    keys: mx.array
    values: mx.array
    slots: mx.array


class KVStore:
    """One K and one V array for each layer, as long as the blocks in use need it, in whole slabs.

    A functional update runs in place only while the store holds the sole reference to an array
    and no read of it is in flight, else MLX copies the whole array. So nothing outside this class
    may keep a pool array or a pending read of one past ``commit``.

    An update in place is ordered by tokens: every write takes the newest one and gives the next,
    every read takes the newest one. A read that nothing has evaluated when a later write of the
    same slots runs may see that write; ``submit`` puts all that it evaluates before later writes.

    Args:
        layout: Shapes, element type and axis order.
        max_blocks: Most blocks in the pool of each KV group.
        fill: Value that every element starts with.
        writer: How the arrays are changed; by functional update if None.
        slab_blocks: Blocks by which the arrays grow; None makes room for all at once.

    Attributes:
        num_blocks: Blocks that the arrays of each group have room for now.
        states: What layers without K and V keep of each sequence.
    """

    def __init__(
        self,
        layout: KVLayout,
        max_blocks: tuple[int, ...],
        fill: float = 0.0,
        writer: PoolWriter | None = None,
        slab_blocks: int | None = None,
    ) -> None:
        assert len(max_blocks) == len(layout.groups)
        self.layout = layout
        self._max_blocks = max_blocks
        self._slab_blocks = slab_blocks or max(max_blocks)
        self._fill = fill
        self._max_bytes = sum(
            count * layout.block_bytes(group) for group, count in enumerate(max_blocks)
        )
        self.num_blocks = [self._in_slabs(group, 1) for group in range(len(max_blocks))]
        # Of each group's arrays; longer than ``num_blocks`` says where resizing some failed.
        self._longest = [*self.num_blocks]
        self.dtype: mx.Dtype = getattr(mx, layout.dtype)
        self._writer = writer or FunctionalWriter()
        # Looked up once: to ask a protocol takes longer than to launch a kernel.
        self._rotating_writer = self._writer if isinstance(self._writer, RotatingWriter) else None
        self._token = self._writer.first_token()
        self._shares_rotations = (
            isinstance(self._writer, FunctionalWriter) and self._writer.shares_rotations
        )
        # Both by identity; the arrays are kept, so that no later ones are taken for them.
        self._rotations: dict[tuple[int, int, mx.Dtype], Rotation] = {}
        self._rows: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}
        self._unwritten: Unwritten | None = None
        self._newest: Unwritten | None = None
        # What a kernel is given for a token where the arrays themselves are ordered.
        self._no_token = mx.zeros(8, mx.int32)
        self.states = StateStore()
        self._pools: dict[int, LayerPool] = {}
        for group, count in zip(layout.groups, self.num_blocks, strict=True):
            for layer in group.layers:
                self._pools[layer] = LayerPool(
                    mx.full(layout.k_shape(layer, count), fill, self.dtype),
                    mx.full(layout.v_shape(layer, count), fill, self.dtype),
                    layout.order,
                )
        mx.eval(*self._arrays())
        mx.synchronize()
        for layer, pool in self._pools.items():
            self._pools[layer] = self._writer.adopt(pool)

    @property
    def updates_in_place(self) -> bool:
        """Whether a step may be submitted while the one before is still under way."""
        return self._token is not None

    @property
    def can_rotate(self) -> bool:
        """Whether there is ``write_rotated``."""
        return self._shares_rotations or self._rotating_writer is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, as they are now."""
        return sum(array.nbytes for array in self._arrays())

    def has_room(self, group: int, num_blocks: int) -> bool:
        """Whether the arrays hold this many blocks."""
        return num_blocks <= self.num_blocks[group]

    def fits(self, group: int, num_blocks: int) -> bool:
        """Whether ``fit`` would change nothing."""
        count = self._in_slabs(group, num_blocks)
        return self.num_blocks[group] == self._longest[group] == count

    def fit(self, group: int, num_blocks: int) -> None:
        """Make the arrays of a group so long that they hold this many blocks, and not longer.

        Waits for all that is under way. Whoever keeps graphs that hold pool arrays must drop them
        before, or the old arrays stay. Meanwhile no more memory is taken than by a pool of all
        blocks, or by one slab (at most ``RESIZE_BYTES``) or one array above the larger size.

        Raises:
            RuntimeError: The device has no memory for it. What was in the pool is still there, and
                another call may go on, or undo what was done.
        """
        count = self._in_slabs(group, num_blocks)
        self.commit()
        self._resize(group, count)

    def _in_slabs(self, group: int, num_blocks: int) -> int:
        slabs = max(1, -(-num_blocks // self._slab_blocks))
        return min(slabs * self._slab_blocks, self._max_blocks[group])

    def _resize(self, group: int, num_blocks: int) -> None:
        layers = self.layout.groups[group].layers
        pools = [self._pools.pop(layer) for layer in layers]
        arrays = [array for pool in pools for array in (pool.keys, pool.values)]
        del pools
        slab_bytes = self._slab_blocks * self.layout.block_bytes(group)
        try:
            set_length(
                arrays,
                num_blocks,
                self._fill,
                most_bytes=self._max_bytes - self.num_bytes,  # of the other groups
                spare_bytes=min(slab_bytes, RESIZE_BYTES),
            )
        finally:
            lengths = {each.shape[0] for each in arrays} or {num_blocks}
            self.num_blocks[group], self._longest[group] = min(lengths), max(lengths)
            for layer, keys, values in zip(layers, arrays[::2], arrays[1::2], strict=True):
                pool = LayerPool(keys, values, self.layout.order)
                self._pools[layer] = self._writer.adopt(pool)

    def write(self, layer: int, keys: mx.array, values: mx.array, slots: mx.array) -> None:
        """Store one K and one V row per token; reads that are asked for later see them.

        Args:
            layer: The layer that they belong to.
            keys: (T, num_kv_heads, k_head_dim).
            values: (T, num_kv_heads, v_head_dim).
            slots: (T,) int64, all distinct and within the pool; see ``check``.
        """
        self._flush()
        if self._token is None:
            # A view of a larger product would keep all of it until the step's end, when this is
            # written; what is attended to meanwhile is the copy.
            keys, values = mx.contiguous(keys), mx.contiguous(values)
        rows = self._newest = Unwritten(layer, keys, values, slots)
        if self._token is None:
            self._write(rows)
        else:
            # The kernel that attends to them can write them too; whatever else comes, writes first.
            self._unwritten = rows

    def write_rotated(self, layer: int, rows: NewRows, rope: Rope) -> mx.array:
        """Rotate K of some rows and store it, and V, at once; see ``write``.

        Returns:
            The rotated queries, (T, num_heads, k_head_dim).
        """
        if self._shares_rotations:
            queries, keys = self._rotate(rows, rope)
            self.write(layer, keys, rows.values.squeeze(2), rows.slots)
            return queries
        pool, token = self.bind(layer)
        self._newest = None
        assert self._rotating_writer is not None
        rotated, self._token = self._rotating_writer.write_rotated(pool, rows, rope, token)
        return rotated

    def claim(self, layer: int, dtype: mx.Dtype) -> Unwritten | None:
        """Take over the rows written last: this layer's, of that type, not in the pool yet.

        Who claims them must write them to their slots, and say so by ``wrote``.
        """
        rows = self._unwritten
        if rows is None or rows.layer != layer:
            return None
        if not rows.keys.dtype == rows.values.dtype == dtype:
            return None
        self._unwritten = None
        return rows

    def newest(self, layer: int, slots: mx.array) -> tuple[mx.array, mx.array] | None:
        """K and V as the last write gave them, for who needs no others: that saves reading them.

        Args:
            layer: The layer to read.
            slots: The very array that the write was given.

        Returns:
            K (T, num_kv_heads, k_head_dim) and V likewise. None if the last write was another, or
            the pool keeps another type, or the step is over.
        """
        rows = self._newest
        if rows is None or rows.layer != layer or rows.slots is not slots:
            return None
        if not rows.keys.dtype == rows.values.dtype == self.dtype:
            return None
        return rows.keys, rows.values

    @property
    def token(self) -> mx.array:
        """The newest token, with every pending write behind it; only where they are in place."""
        self._flush()
        assert self._token is not None
        return self._token

    def wrote(self, token: mx.array) -> None:
        """Note that a kernel that took the newest token has written, and gave this one."""
        self._token = token

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
        self._flush()
        self._newest = None
        pools = [self._pools[layer] for layer in self.layout.groups[group].layers]
        self._token = self._writer.copy_blocks(pools, src, dst, self._token)

    def bind(self, layer: int) -> tuple[LayerPool, mx.array]:
        """A layer's arrays and the newest token, for a kernel that reads them.

        The kernel must be called at once, with the token among its inputs, and must not write.
        The arrays must not be kept.
        """
        self._flush()
        return self._pools[layer], self._no_token if self._token is None else self._token

    def gather(self, layer: int, block_tables: mx.array) -> tuple[mx.array, mx.array]:
        """Read blocks in the order of their tables; lazy, so free when unused.

        Slots that hold no live token come as they are, NaN included.

        Args:
            layer: The layer to read.
            block_tables: (S, B) int32; valid block ids only.

        Returns:
            K (S, num_kv_heads, B * block_size, k_head_dim) and V likewise, in the pool's type.
        """
        pool, block_tables = self._pools[layer], self._after_writes(block_tables)
        return (
            _gather_blocks(pool.keys, block_tables, pool.order),
            _gather_blocks(pool.values, block_tables, pool.order),
        )

    def gather_slots(self, layer: int, slots: mx.array) -> tuple[mx.array, mx.array]:
        """Read single slots, in any order and as often as named; lazy, like ``gather``.

        Args:
            layer: The layer to read.
            slots: (S, N) int64, all within the pool.

        Returns:
            K (S, num_kv_heads, N, k_head_dim) and V likewise, in the pool's type.
        """
        num_heads = self.layout.layers[layer].num_kv_heads
        key = id(slots), num_heads
        if key not in self._rows:
            self._rows[key] = slots, self._rows_of(slots, num_heads)
        rows, pool = self._after_writes(self._rows[key][1]), self._pools[layer]
        return _gather_rows(pool.keys, rows), _gather_rows(pool.values, rows)

    def commit(self, *outputs: mx.array) -> None:
        """Evaluate a step's outputs together with every pending write, and wait for both.

        After this no read is in flight, so the next functional writes run in place.
        """
        self._flush()
        self._forget_step()
        self._evaluate(*outputs)

    def submit(self, *outputs: mx.array) -> None:
        """Start a step's outputs and every pending write; later writes come after both.

        Where the pool is updated functionally this is ``commit``.
        """
        if self._token is None:
            self.commit(*outputs)
            return
        self._flush()
        self._forget_step()
        states = self.states.take_pending()
        mx.async_eval(*outputs, *states, self._token)
        # The last state depends on all that the step has read before it.
        for output in (*outputs, *states[-1:]):
            if output.size:
                # Reads of this step are ordered only against what depends on their results.
                self._token = _after(output.reshape(-1)[:1].astype(mx.int32), self._token)

    def _rotate(self, rows: NewRows, rope: Rope) -> tuple[mx.array, mx.array]:
        num_rows, num_heads, _, _ = rows.queries.shape
        positions, dtype = rows.positions, rows.queries.dtype
        key = id(rope), id(positions), dtype
        if key not in self._rotations:
            self._rotations[key] = Rotation(rope, positions, num_rows, dtype)
        rotated = self._rotations[key].apply(mx.concatenate([rows.queries, rows.keys], axis=1))
        return rotated[:, :num_heads], rotated[:, num_heads:]

    def _rows_of(self, slots: mx.array, num_heads: int) -> mx.array:
        """(S, num_heads, N) int64: where the slots' heads are, with D elements as a row."""
        block_size = self.layout.block_size
        heads = mx.arange(num_heads, dtype=slots.dtype)[:, None]
        if self.layout.order is AxisOrder.SLOT_MAJOR:
            return (slots * num_heads)[:, None] + heads
        blocks, offsets = slots // block_size, slots % block_size
        return (blocks * (num_heads * block_size) + offsets)[:, None] + heads * block_size

    def _forget_step(self) -> None:
        """Keep nothing that layers of one step share."""
        self._newest = None
        self._rotations.clear()
        self._rows.clear()

    def _flush(self) -> None:
        if self._unwritten is not None:
            rows, self._unwritten = self._unwritten, None
            self._write(rows)

    def _write(self, rows: Unwritten) -> None:
        self._token = self._writer.write(
            self._pools[rows.layer], rows.keys, rows.values, rows.slots, self._token
        )

    def _evaluate(self, *outputs: mx.array) -> None:
        pool = self._arrays() if self._token is None else [self._token]
        mx.eval(*outputs, *self.states.take_pending(), *pool)
        mx.synchronize()

    def _arrays(self) -> list[mx.array]:
        return [array for pool in self._pools.values() for array in (pool.keys, pool.values)]

    def _after_writes(self, ids: mx.array) -> mx.array:
        """The same ids, but known only once every pending write has happened."""
        self._flush()
        return ids if self._token is None else ids + self._token[:1].astype(ids.dtype)

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


@mx.compile
def _after(done: mx.array, token: mx.array) -> mx.array:
    """The same token, but known only once ``done`` is. One launch, and no constant to upload."""
    return mx.bitwise_xor(done, done) + token


def _check_range(what: str, ids: npt.NDArray[np.integer], limit: int) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < limit):
        raise IndexError(f"{what} ids {ids.min()} to {ids.max()} must be within [0, {limit})")


def _check_distinct(what: str, ids: npt.NDArray[np.integer]) -> None:
    ordered = np.sort(ids)
    if (ordered[1:] == ordered[:-1]).any():
        raise ValueError(f"a {what} is named twice among {ids.size}")
