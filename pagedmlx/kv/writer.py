"""PoolWriter: how rows and blocks get into pool arrays, and the functional way to do it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.kv.layout import AxisOrder


@dataclass(frozen=True, slots=True)
class LayerPool:
    """One layer's arrays.

    Attributes:
        keys: (num_blocks, num_kv_heads, block_size, k_head_dim), or with the axes of SLOT_MAJOR.
        values: Likewise with v_head_dim.
        order: Order of the axes.
        views: What kernels are given in place of the arrays, if not the arrays themselves.
    """

    keys: mx.array
    values: mx.array
    order: AxisOrder
    views: tuple[mx.array, mx.array] | None = None

    @property
    def bound(self) -> tuple[mx.array, mx.array]:
        """K and V as kernels are given them."""
        return self.views or (self.keys, self.values)


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotation by position, as ``mx.fast.rope`` does it; equal if it differs in ``freqs`` alone.

    Attributes:
        dims: Elements of a row that are rotated, the first ones.
        traditional: Whether elements that lie side by side are rotated together.
        base: Of the wavelengths; None where ``freqs`` has them.
        scale: Factor on positions.
        freqs: (dims / 2,) float32.
    """

    dims: int
    traditional: bool
    base: float | None
    scale: float
    freqs: mx.array | None = field(default=None, compare=False)

    def rotate(self, rows: mx.array, positions: mx.array) -> mx.array:
        """Do it by MLX itself.

        Args:
            rows: (T, heads, 1, head_dim).
            positions: (T or more,) int32.

        Returns:
            (T, heads, head_dim).
        """
        return mx.fast.rope(
            rows,
            self.dims,
            traditional=self.traditional,
            base=self.base,
            scale=self.scale,
            offset=positions[: len(rows)],
            freqs=self.freqs,
        ).squeeze(2)


class Rotation:
    """A rope at some positions: what depends on them is computed once, for all layers.

    Its results are those of ``Rope.rotate`` on a CPU, bit for bit.

    Args:
        rope: How to rotate.
        positions: (T or more,) int32.
        num_rows: T.
        dtype: Of the rows.

    Attributes:
        rope: As given.
        positions: As given.
    """

    def __init__(self, rope: Rope, positions: mx.array, num_rows: int, dtype: mx.Dtype) -> None:
        self.rope, self.positions = rope, positions
        half = rope.dims // 2
        self._axis, self._pairs = (-1, (half, 2)) if rope.traditional else (-2, (2, half))
        # MLX turns (1, 0) into a cosine and a sine, which are rounded as they are in its own way.
        one = mx.array([1, 0], dtype).reshape((1, 2) if rope.traditional else (2, 1))
        ones = mx.broadcast_to(one, (num_rows, 1, *self._pairs)).reshape(num_rows, 1, 1, -1)
        turned = rope.rotate(ones, positions).reshape(num_rows, 1, *self._pairs)
        cos, sin = mx.split(turned, 2, axis=self._axis)
        self._cos = mx.concatenate([cos, cos], axis=self._axis)
        self._sin = mx.concatenate([-sin, sin], axis=self._axis)

    def apply(self, rows: mx.array) -> mx.array:
        """Rotate (T, heads, 1, head_dim), which becomes (T, heads, head_dim)."""
        num_rows, num_heads, _, head_dim = rows.shape
        dims = self.rope.dims
        rows = rows.squeeze(2)
        pairs = rows[..., :dims].reshape(num_rows, num_heads, *self._pairs)
        swapped = pairs[..., ::-1] if self._axis == -1 else pairs[..., ::-1, :]
        turned = (pairs * self._cos + swapped * self._sin).reshape(num_rows, num_heads, dims)
        return turned if dims == head_dim else mx.concatenate([turned, rows[..., dims:]], axis=-1)


@dataclass(frozen=True, slots=True)
class NewRows:
    """What an attention layer has computed for T rows of one token, nothing of it rotated yet.

    Attributes:
        queries: (T, num_heads, 1, k_head_dim), all in the same type.
        keys: (T, num_kv_heads, 1, k_head_dim).
        values: (T, num_kv_heads, 1, v_head_dim).
        positions: (T or more,) int32, padded to 8 elements.
        slots: (T,) int64.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    positions: mx.array
    slots: mx.array


class PoolWriter(Protocol):
    """Changes pool arrays, in place or by functional update.

    A token stands for everything that has happened to the pool: what depends on the newest token
    comes after it. A writer that has none (None) is ordered by the arrays themselves.
    """

    def first_token(self) -> mx.array | None:
        """The token of a fresh pool."""
        ...

    def adopt(self, pool: LayerPool) -> LayerPool:
        """The same pool as this writer wants it, once, before its first write."""
        ...

    def write(
        self,
        pool: LayerPool,
        keys: mx.array,
        values: mx.array,
        slots: mx.array,
        token: mx.array | None,
    ) -> mx.array | None:
        """Store one K and one V row per token; arguments as in ``KVStore.write``.

        Returns:
            The next token.
        """
        ...

    def copy_blocks(
        self,
        pools: list[LayerPool],
        src: npt.NDArray[np.int32],
        dst: npt.NDArray[np.int32],
        token: mx.array | None,
    ) -> mx.array | None:
        """Copy blocks of several layers, as if all at once; ids are checked.

        Returns:
            The next token.
        """
        ...


@runtime_checkable
class RotatingWriter(Protocol):
    """A writer that can also rotate what it writes, and the queries that go with it."""

    def write_rotated(
        self, pool: LayerPool, rows: NewRows, rope: Rope, token: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Store K, rotated, and V of some rows.

        Returns:
            The rotated queries, (T, num_heads, k_head_dim), and the next token.
        """
        ...


class FunctionalWriter:
    """Updates by index assignment, in place only while no read of the array is pending.

    No name in here may outlive the statement that replaces an array of the pool.

    Args:
        shares_rotations: Whether queries and keys are left to the store to rotate, which computes
            sines and cosines once for all layers. On a CPU, MLX does so at each rotation.

    Attributes:
        shares_rotations: As given.
    """

    def __init__(self, *, shares_rotations: bool = False) -> None:
        self.shares_rotations = shares_rotations
        self._places: tuple[mx.array, int, mx.array, mx.array] | None = None

    def first_token(self) -> None:
        """See ``PoolWriter.first_token``."""
        return

    def adopt(self, pool: LayerPool) -> LayerPool:
        """See ``PoolWriter.adopt``."""
        return pool

    def write(
        self,
        pool: LayerPool,
        keys: mx.array,
        values: mx.array,
        slots: mx.array,
        token: mx.array | None,
    ) -> None:
        """See ``PoolWriter.write``."""
        head_major = pool.order is AxisOrder.HEAD_MAJOR
        block_size = pool.keys.shape[2 if head_major else 1]
        blocks, offsets = self._place(slots, block_size)
        for array, rows in ((pool.keys, keys), (pool.values, values)):
            if head_major:
                array[blocks, :, offsets] = rows.astype(array.dtype)
            else:
                array[blocks, offsets] = rows.astype(array.dtype)

    def copy_blocks(
        self,
        pools: list[LayerPool],
        src: npt.NDArray[np.int32],
        dst: npt.NDArray[np.int32],
        token: mx.array | None,
    ) -> None:
        """See ``PoolWriter.copy_blocks``."""
        sources, targets = mx.array(src), mx.array(dst)
        for arrays in ([pool.keys for pool in pools], [pool.values for pool in pools]):
            buffers = [array[sources] for array in arrays]
            # A pending read of the array would make the update copy all of it.
            mx.eval(buffers)
            for array, buffer in zip(arrays, buffers, strict=True):
                array[targets] = buffer

    def _place(self, slots: mx.array, block_size: int) -> tuple[mx.array, mx.array]:
        """Blocks of slots and offsets in them; made once for all layers of a step."""
        found = self._places
        if found is None or found[0] is not slots or found[1] != block_size:
            found = self._places = slots, block_size, slots // block_size, slots % block_size
        return found[2:]
