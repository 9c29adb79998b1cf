"""Cases of ``rope_write.metal``, and their answer in float64, which knows nothing of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import numpy as np

from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.kv.layout import AxisOrder, KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import NewRows, Rope
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.launch import Launcher
from tests.metal.cases import covering
from tests.support.attention import TOLERANCES, to_numpy

POSITIONS = (0, 1, 100, 7, 33, 64, 2, 90, 11)
LONG = 5000
"""A position whose angles float32 still knows well enough for types of 16 bits."""


@dataclass(frozen=True)
class RopeCase:
    """Everything that a launch depends on."""

    dtype: str
    pool_dtype: str
    head_dims: tuple[int, int]
    block_size: int
    factor: int
    num_kv_heads: int
    order: AxisOrder
    part: str
    traditional: bool
    wavelengths: str
    scale: float
    layout: str
    num_rows: int

    def __str__(self) -> str:
        values = (getattr(self, field.name) for field in fields(self))
        return "-".join(v.name if isinstance(v, AxisOrder) else str(v) for v in values)

    @property
    def rope(self) -> Rope:
        """The rotation: of all dims or a part of them; by a base or by wavelengths of their own."""
        dims = {"all": self.head_dims[0], "half": self.head_dims[0] // 2, "two": 2}[self.part]
        if self.wavelengths == "base":
            return Rope(dims, self.traditional, 10000.0, self.scale)
        freqs = np.geomspace(1.0, 5e5, dims // 2).astype(np.float32)
        if self.wavelengths == "endless":
            freqs[dims // 4 :] = np.inf
        return Rope(dims, self.traditional, None, self.scale, mx.array(freqs))

    @property
    def positions(self) -> np.ndarray:
        """One position for each row."""
        positions = np.resize(np.array(POSITIONS, np.int32), self.num_rows)
        if self.dtype != "float32":
            positions[-1] = LONG
        return positions

    @property
    def slots(self) -> np.ndarray:
        """Scattered slots; one row goes nowhere where there are several."""
        rng = np.random.default_rng(self.num_rows)
        slots = rng.permutation(self.num_blocks * self.block_size)[: self.num_rows].astype(np.int64)
        if self.num_rows > 2:
            slots[1] = -1
        return slots

    @property
    def num_blocks(self) -> int:
        """More than the rows fill."""
        return -(-self.num_rows // self.block_size) + 2

    def deviation(self, launcher: Launcher) -> float:
        """Largest error against float64, in units of the type's tolerance; infinite for NaN.

        Slots that no row goes to must hold what they held.
        """
        store, rows = self.make(launcher)
        rotated = store.write_rotated(0, rows, self.rope)
        assert rotated.dtype == rows.queries.dtype
        slots = mx.arange(self.num_blocks * self.block_size, dtype=mx.int64)[None]
        found = [rotated, *(each[0].swapaxes(0, 1) for each in store.gather_slots(0, slots))]
        store.commit(*found)
        queries, keys, values = map(to_numpy, (rows.queries, rows.keys, rows.values))
        expected = [
            self.rotated(queries),
            self.in_pool(self.rotated(keys)),
            self.in_pool(values[:, :, 0]),
        ]
        return max(map(self._deviation, found, expected))

    def _deviation(self, found: mx.array, expected: np.ndarray) -> float:
        tolerance = max(TOLERANCES[self.dtype], TOLERANCES[self.pool_dtype])
        error = np.abs(to_numpy(found) - expected) / (tolerance * (1 + np.abs(expected)))
        return float(np.where(np.isnan(error), np.inf, error).max())

    def make(self, launcher: Launcher) -> tuple[KVStore, NewRows]:
        """A pool of ones, and rows that lie in memory as the case wants it."""
        k_head_dim, v_head_dim = self.head_dims
        layout = KVLayout(
            block_size=self.block_size,
            dtype=self.pool_dtype,
            layers=(LayerShape(self.num_kv_heads, k_head_dim, v_head_dim),),
            groups=(KVGroup(KVGroupKind.FULL, (0,)),),
            order=self.order,
        )
        heads = (self.num_kv_heads * self.factor, self.num_kv_heads, self.num_kv_heads)
        positions = np.zeros(max(self.num_rows, 8), np.int32)
        positions[: self.num_rows] = self.positions
        shapes = tuple(zip(heads, (k_head_dim, k_head_dim, v_head_dim), strict=True))
        queries, keys, values = self._rows(shapes)
        rows = NewRows(queries, keys, values, mx.array(positions), mx.array(self.slots))
        return KVStore(layout, (self.num_blocks,), 1.0, InPlaceWriter(launcher)), rows

    def _rows(self, shapes: tuple[tuple[int, int], ...]) -> list[mx.array]:
        """Random rows: pieces of one product, arrays of their own, or such with other strides."""
        rng = np.random.default_rng(0)
        num_rows, dtype = self.num_rows, getattr(mx, self.dtype)

        def random(*shape: int) -> mx.array:
            return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)

        apart = [random(num_rows, heads, 1, dim) for heads, dim in shapes]
        if self.layout == "apart":
            return apart
        if self.layout == "transposed":
            turned = [random(h, 1, dim, num_rows).transpose(3, 0, 1, 2) for h, dim in shapes]
            return [turned[0], apart[1], turned[2]]
        ends = np.cumsum([heads * dim for heads, dim in shapes]).tolist()
        pieces = mx.split(random(num_rows, 1, ends[-1]), ends[:-1], axis=-1)
        return [
            piece.reshape(num_rows, 1, heads, dim).transpose(0, 2, 1, 3)
            for piece, (heads, dim) in zip(pieces, shapes, strict=True)
        ]

    def rotated(self, rows: np.ndarray) -> np.ndarray:
        """(T, heads, 1, D) as (T, heads, D), pair by pair as a textbook writes it."""
        rope, rows = self.rope, rows[:, :, 0].copy()
        half = rope.dims // 2
        for pair in range(half):
            if rope.freqs is None:
                assert rope.base is not None
                turn = np.float32(rope.base ** (-pair / half))
            else:
                turn = 1 / np.array(rope.freqs)[pair]
            angles = self.positions.astype(np.float64) * rope.scale * turn
            low, high = (2 * pair, 2 * pair + 1) if rope.traditional else (pair, pair + half)
            z = (rows[..., low] + 1j * rows[..., high]) * np.exp(1j * angles)[:, None]
            rows[..., low], rows[..., high] = z.real, z.imag
        return rows

    def in_pool(self, rows: np.ndarray) -> np.ndarray:
        """What all slots hold after these rows were written."""
        pool = np.ones((self.num_blocks * self.block_size, *rows.shape[1:]))
        written = self.slots >= 0
        pool[self.slots[written]] = rows[written]
        return pool


AXES: Mapping[str, Sequence[Any]] = {
    "dtype": tuple(TOLERANCES),
    "pool_dtype": tuple(TOLERANCES),
    "head_dims": ((8, 8), (64, 64), (72, 40), (80, 80), (128, 128), (192, 128), (40, 96)),
    "block_size": (2, 16, 64),
    "factor": (1, 3, 4, 8),
    "num_kv_heads": (1, 2, 3),
    "order": tuple(AxisOrder),
    "part": ("all", "half", "two"),
    "traditional": (False, True),
    "wavelengths": ("base", "own", "endless"),
    "scale": (1.0, 0.25),
    "layout": ("joined", "apart", "transposed"),
    "num_rows": (1, 3, 9, 70),
}


def covering_ropes() -> list[RopeCase]:
    """Few cases in which any two values of two axes meet."""
    return [RopeCase(**values) for values in covering(AXES)]
