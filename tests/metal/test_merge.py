"""``merge.metal`` alone, executed: any number of a row's own and shared chunks, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.ops.launch import SIMD_WIDTH, Launch
from pagedmlx.ops.variants import MergeVariant, PoolShape
from pagedmlx.ops.worklist import HEADER, MERGE_ROW
from tests.metal.launcher import FiberLauncher
from tests.support.attention import to_numpy

NOTHING_SEEN = -0.5 * float(np.finfo(np.float32).max)
"""The largest score of a chunk in which a row sees nothing."""

# Around the borders of SIMD-groups; of each row its own chunks and the shared ones.
NUM_PLACES = 9
ALONE = [(count, 0) for count in (0, 1, 2, 31, 32, 33, 63, 64, 65)]
SHARED = [(0, 3), (1, 31), (1, 32), (31, 1), (31, 2), (32, 33), (33, 0), (64, 1), (1, 65)]


@dataclass(frozen=True)
class Setting:
    """What a launch depends on; row i has ``rows[i]`` chunks of its own and shared ones.

    Each row has some place in its sequence, and another one among those it shares with, which are
    cut in tiles of ``vectors`` and ``shared`` query vectors.
    """

    rows: Sequence[tuple[int, int]]
    vectors: int
    shared: int
    num_simdgroups: int
    sinks: bool
    factor: int
    v_head_dim: int
    num_kv_heads: int = 2

    def variant(self) -> MergeVariant:
        pool = PoolShape("float32", self.num_kv_heads, 64, self.v_head_dim, 16)
        return MergeVariant(
            pool,
            "float32",
            self.factor,
            self.vectors,
            self.sinks,
            self.num_simdgroups,
            self.shared,
        )

    def deviation(self, seed: int) -> float:
        """Largest error; infinite where something is read that belongs to no chunk of a row."""
        rng = np.random.default_rng(seed)
        variant = self.variant()
        heads, factor = self.num_kv_heads, self.factor
        dim, num_rows = self.v_head_dim, len(self.rows)
        tiles = [-(-NUM_PLACES * factor // max(each, 1)) for each in (self.vectors, self.shared)]
        own, others = (
            _Parts(sum(row[i] * tiles[i] for row in self.rows) + 1, heads, vectors, dim)
            for i, vectors in enumerate((self.vectors, max(self.shared, 1)))
        )
        places = rng.integers(0, NUM_PLACES, (num_rows, 2))
        sinks = rng.standard_normal(heads * factor).astype(np.float32)
        plan = np.zeros(HEADER + MERGE_ROW * num_rows, np.int32)
        plan[2:4] = HEADER, num_rows
        merges = plan[HEADER:].reshape(num_rows, MERGE_ROW)
        expected = np.empty((num_rows, heads * factor, dim))
        first_own = first_shared = 0
        for row, (num_own, count) in enumerate(self.rows):
            merges[row, :3] = first_own, num_own, places[row, 0]
            merges[row, 3:6] = first_shared, count, places[row, 1]
            for head in range(heads * factor):
                kv_head, vector = divmod(head, factor)
                tile, column = divmod(places[row, 0] * factor + vector, self.vectors)
                first = first_own + tile * num_own
                found = [own.fill(rng, first + i, kv_head, column) for i in range(num_own)]
                if count:
                    tile, column = divmod(places[row, 1] * factor + vector, self.shared)
                    first = first_shared + tile * count
                    found += [others.fill(rng, first + i, kv_head, column) for i in range(count)]
                expected[row, head] = _merged(found, sinks[head] if self.sinks else None)
            first_own += num_own * tiles[0]
            first_shared += count * tiles[1]
        inputs = [own.partials, own.stats, plan]
        inputs += [sinks] if self.sinks else []
        inputs += [others.partials, others.stats] if self.shared else []
        threads = self.num_simdgroups * SIMD_WIDTH
        (output,) = FiberLauncher(seed)(
            Launch(
                variant.kernel,
                [mx.array(each) for each in inputs],
                num_rows * heads * factor * threads,
                threads,
                [expected.shape],
                [mx.float32],
            )
        )
        error = np.abs(to_numpy(output) - expected)
        return float(np.where(np.isnan(error), np.inf, error).max())


class _Parts:
    """Partial results of which only those that were filled are numbers."""

    def __init__(self, num_items: int, heads: int, num_vectors: int, dim: int) -> None:
        self.partials = np.full((num_items, heads, num_vectors, dim), np.nan, np.float32)
        self.stats = np.full((num_items, heads, num_vectors, 2), np.nan, np.float32)

    def fill(self, rng: np.random.Generator, *place: int) -> tuple[np.ndarray, np.ndarray]:
        """A partial result with its largest score and its sum of weights."""
        if np.isnan(self.stats[place][0]):
            sees = rng.random() < 0.9
            self.stats[place] = (
                (rng.normal(0, 20), rng.uniform(1, 9)) if sees else (NOTHING_SEEN, 0)
            )
            self.partials[place] = rng.standard_normal(self.partials.shape[-1]) * sees
        return self.partials[place].astype(np.float64), self.stats[place].astype(np.float64)


def _merged(found: list[tuple[np.ndarray, np.ndarray]], sink: float | None) -> np.ndarray:
    if not found:
        return np.zeros(())
    tops = [stats[0] for _, stats in found]
    scores = np.array(tops if sink is None else [*tops, sink / np.log(2)])
    shares = np.exp2(scores - scores.max())
    own = shares[: len(found)]
    total = own @ [stats[1] for _, stats in found] + shares[len(found) :].sum()
    values = own @ np.array([partial for partial, _ in found])
    return values / total if total else np.zeros_like(values)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(ALONE, 32, 0, num_simdgroups=1, sinks=False, factor=5, v_head_dim=80),
        Setting(ALONE, 32, 0, num_simdgroups=8, sinks=True, factor=2, v_head_dim=256),
        Setting(SHARED, 64, 32, num_simdgroups=1, sinks=True, factor=5, v_head_dim=112),
        Setting(SHARED, 16, 64, num_simdgroups=8, sinks=False, factor=8, v_head_dim=48),
    ],
    ids=str,
)
def test_any_number_of_chunks_gives_their_sum(setting: Setting) -> None:
    assert max(setting.deviation(seed) for seed in range(2)) < 1e-5


def test_rows_that_see_nothing_have_no_output() -> None:
    variant = Setting([(1, 0)], 1, 0, 1, sinks=False, factor=1, v_head_dim=16, num_kv_heads=1)
    plan = np.zeros(HEADER + MERGE_ROW, np.int32)
    plan[2:4] = HEADER, 1
    plan[HEADER + 1] = 1
    stats = np.zeros((4, 1, 1, 2), np.float32)
    stats[..., 0] = NOTHING_SEEN
    launch = Launch(
        variant.variant().kernel,
        [mx.zeros((4, 1, 1, 16)), mx.array(stats), mx.array(plan)],
        SIMD_WIDTH,
        SIMD_WIDTH,
        [(1, 1, 16)],
        [mx.float32],
    )
    assert not to_numpy(FiberLauncher()(launch)[0]).any()
