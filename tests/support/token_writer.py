"""A writer for tests of steps that are not waited for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.kv.writer import FunctionalWriter, LayerPool


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
