"""A writer for tests of steps that are not waited for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.kv.writer import FunctionalWriter, LayerPool, NewRows, Rope


class TokenWriter:
    """Updates functionally, but says that it does so in place: steps are not waited for."""

    def __init__(self) -> None:
        self._inner = FunctionalWriter()

    def first_token(self) -> mx.array:
        return mx.zeros(8, mx.int32)

    def adopt(self, pool: LayerPool) -> LayerPool:
        return pool

    def write(
        self,
        pool: LayerPool,
        keys: mx.array,
        values: mx.array,
        slots: mx.array,
        token: mx.array | None,
    ) -> mx.array | None:
        self._inner.write(pool, keys, values, slots, token)
        return token

    def copy_blocks(
        self,
        pools: list[LayerPool],
        src: npt.NDArray[np.int32],
        dst: npt.NDArray[np.int32],
        token: mx.array | None,
    ) -> mx.array | None:
        self._inner.copy_blocks(pools, src, dst, token)
        return token


class RotatingTokenWriter:
    """``TokenWriter`` that also rotates, by MLX's own operations.

    Attributes:
        num_rotated: Writes of rotated rows.
    """

    def __init__(self) -> None:
        self._inner = TokenWriter()
        self.first_token = self._inner.first_token
        self.adopt = self._inner.adopt
        self.write = self._inner.write
        self.copy_blocks = self._inner.copy_blocks
        self.num_rotated = 0

    def write_rotated(
        self, pool: LayerPool, rows: NewRows, rope: Rope, token: mx.array
    ) -> tuple[mx.array, mx.array]:
        queries, keys = (rope.rotate(each, rows.positions) for each in (rows.queries, rows.keys))
        self.write(pool, keys, rows.values.squeeze(2), rows.slots, token)
        self.num_rotated += 1
        return queries, token
