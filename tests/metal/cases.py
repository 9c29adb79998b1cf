"""Which variants of the kernels the tests cover, and the case of attention that each one runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import numpy as np

from pagedmlx.kv.layout import AxisOrder
from pagedmlx.ops.base import AttentionParams
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Launcher
from pagedmlx.ops.variants import BLOCK_SIZES, HEAD_DIMS, MAX_MATRIX_HEAD_DIM
from pagedmlx.ops.worklist import MIN_CHUNK
from tests.support.attention import TOLERANCES, Case, make_case, planned_ahead

# Chunks of the fewest tokens, or sequences that are never cut.
_SPLIT_WAVE, _WHOLE_WAVE = 1 << 30, 1
_NUM_PADDING = 2


@dataclass(frozen=True)
class Variant:
    """Everything that a launch of the kernels depends on, sequence lengths aside."""

    dtype: str
    head_dims: tuple[int, int]
    block_size: int
    factor: int
    rows: int
    split: bool
    num_kv_heads: int
    order: AxisOrder
    window: int | None
    softcap: float | None
    sinks: bool
    chunks: int  # of the longest sequence, where sequences are split
    decode: str = "lanes"

    def __str__(self) -> str:
        values = (getattr(self, field.name) for field in fields(self))
        return "-".join(v.name if isinstance(v, AxisOrder) else str(v) for v in values)

    def lengths(self) -> list[int]:
        """Context lengths around the borders of blocks and chunks, at least the query's rows."""
        size = self.block_size
        last = MIN_CHUNK * (self.chunks - 1) + 2 if self.split else 1
        around = [self.rows, size - 1, size, size + 1, 63, 64, 65]
        return [max(length, self.rows) for length in (*around, last)]

    def make_case(self, launcher: Launcher, seed: int = 0) -> Case:
        """A ragged batch; a pool that holds NaN but for what the write kernel wrote."""
        rows = sorted(1 + i % self.rows for i in range(len(self.lengths())))
        return make_case(
            [(length - count, count) for length, count in zip(self.lengths(), rows, strict=True)],
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            factor=self.factor,
            k_head_dim=self.head_dims[0],
            v_head_dim=self.head_dims[1],
            dtype=self.dtype,
            order=self.order,
            seed=seed,
            writer=InPlaceWriter(launcher),
        )

    def params(self) -> AttentionParams:
        heads = self.num_kv_heads * self.factor
        sinks = mx.array(np.linspace(-2.0, 3.0, heads, dtype=np.float32)) if self.sinks else None
        return AttentionParams(
            scale=self.head_dims[0] ** -0.5,
            window=self.window,
            softcap=self.softcap,
            sinks=sinks,
        )

    def backend(self, launcher: Launcher) -> KernelBackend:
        wave = _SPLIT_WAVE if self.split else _WHOLE_WAVE
        return KernelBackend(launcher, wave, decode=self.decode)

    def deviation(self, launcher: Launcher, seed: int = 0) -> float:
        """Largest error against float64, in units of the type's tolerance; infinite for NaN.

        Single rows have rows of padding behind them, which must be zeros.
        """
        case, params, backend = (
            self.make_case(launcher, seed),
            self.params(),
            self.backend(launcher),
        )
        expected = case.expected(params)
        if self.rows == 1:
            case = planned_ahead(case, backend, params, _NUM_PADDING)
            nothing = np.zeros((_NUM_PADDING, *expected.shape[1:]))
            expected = np.concatenate([expected, nothing])
        output = case.attend(backend, params)
        error = np.abs(output - expected) / (TOLERANCES[self.dtype] * (1 + np.abs(expected)))
        return float(np.where(np.isnan(error), np.inf, error).max())


FIRST: Mapping[str, Sequence[Any]] = {
    "dtype": tuple(TOLERANCES),
    "head_dims": (*((dim, dim) for dim in HEAD_DIMS), (192, 128)),
    "factor": (1, 2, 3, 4, 5, 7, 8, 16),
    "rows": (1, 2, 4, 8),
    "split": (False, True),
}
SECOND: Mapping[str, Sequence[Any]] = {
    "block_size": BLOCK_SIZES,
    "num_kv_heads": (1, 2, 3),
    "order": tuple(AxisOrder),
    "window": (None, 5, 70),
    "softcap": (None, 20.0),
    "sinks": (False, True),
    "chunks": (3, 18),  # merged by one SIMD-group, and by several
}
# Where decode can be by matrices.
FIRST_OF_MATRICES: Mapping[str, Sequence[Any]] = {
    "dtype": ("float16", "bfloat16"),
    "head_dims": tuple(dims for dims in FIRST["head_dims"] if max(dims) <= MAX_MATRIX_HEAD_DIM),
    "factor": (5, 7, 8, 16),
    "rows": FIRST["rows"],
    "split": FIRST["split"],
}
SECOND_OF_MATRICES: Mapping[str, Sequence[Any]] = {
    **SECOND,
    "block_size": tuple(size for size in BLOCK_SIZES if size >= 8),
    "decode": ("matrices",),
}


def every_variant() -> list[Variant]:
    """All values of the first axes with each other; the second axes take turns."""
    rng = random.Random(0)
    return [
        Variant(
            **dict(zip(first, values, strict=True)),
            **{name: rng.choice(axis) for name, axis in second.items()},
        )
        for first, second in ((FIRST, SECOND), (FIRST_OF_MATRICES, SECOND_OF_MATRICES))
        for values in itertools.product(*first.values())
    ]


def covering_variants() -> list[Variant]:
    """Few variants in which any two values of two axes meet."""
    return [
        Variant(**values)
        for axes in ({**FIRST, **SECOND}, {**FIRST_OF_MATRICES, **SECOND_OF_MATRICES})
        for values in covering(axes)
    ]


def covering(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few choices of a value for each axis in which any two values of two axes meet (greedily)."""
    rng = random.Random(0)
    missing = set(_pairs(axes))
    choices = []
    while missing:
        # Each candidate holds one pair that is missing; the best of several adds most of them.
        starts = rng.sample(sorted(missing, key=sorted), min(len(missing), 30))
        candidates = [_candidate(axes, pair, rng) for pair in starts]
        best = max(candidates, key=lambda values: len(missing & _pairs_of(values)))
        missing -= _pairs_of(best)
        choices.append({name: axes[name][at] for name, at in best.items()})
    return choices


_Pair = frozenset[tuple[str, int]]


def _pairs(axes: Mapping[str, Sequence[Any]]) -> Iterator[_Pair]:
    for (a, left), (b, right) in itertools.combinations(axes.items(), 2):
        for i, j in itertools.product(range(len(left)), range(len(right))):
            yield frozenset({(a, i), (b, j)})


def _pairs_of(values: Mapping[str, int]) -> set[_Pair]:
    return {frozenset(pair) for pair in itertools.combinations(values.items(), 2)}


def _candidate(
    axes: Mapping[str, Sequence[Any]], pair: _Pair, rng: random.Random
) -> dict[str, int]:
    values = {name: rng.randrange(len(axis)) for name, axis in axes.items()}
    return values | dict(pair)
