"""The plan of the prefill kernel; its answers are in tests/metal."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pagedmlx.kv.layout import DTYPE_BYTES
from pagedmlx.ops.cascade import CascadePath
from pagedmlx.ops.decode import DecodePlanner
from pagedmlx.ops.launch import Platform
from pagedmlx.ops.prefill import (
    Prefill,
    PrefillVariant,
    plan_prefill,
)
from pagedmlx.ops.variants import MAX_MATRIX_HEAD_DIM, DecodePath, DecodeVariant, PoolShape
from tests.support.batches import make_batch

SPANS = ((9, 1), (40, 1), (3, 5), (0, 9), (100, 64), (31, 33), (7, 200))
MANY = [3, 4, 5, 6]


def variant(
    factor: int = 4,
    dtype: str = "float16",
    k_head_dim: int = 64,
    v_head_dim: int | None = None,
    **settings: int,
) -> PrefillVariant:
    shape = PoolShape(dtype, 2, k_head_dim, v_head_dim or k_head_dim, block_size=16)
    return PrefillVariant(shape, dtype, factor, **settings)


def plans(
    factor: int, window: int | None = None, max_work: int = 1 << 40, spans=SPANS, chosen=MANY
) -> tuple[list[Prefill], object]:
    host = make_batch(spans, block_size=16, num_blocks=60, rng=np.random.default_rng(0))
    return plan_prefill(host, chosen, 0, window, variant(factor), max_work), host


def items_of(launch: Prefill) -> tuple[np.ndarray, np.ndarray]:
    plan = np.array(launch.plan)
    assert plan[0] == launch.num_items
    return plan, plan[8 : 8 + 8 * launch.num_items].reshape(-1, 8)


@pytest.mark.parametrize("factor", [1, 2, 3, 5, 8, 16, 40])
@pytest.mark.parametrize("max_work", [1, 1 << 22, 1 << 40])
def test_every_query_vector_belongs_to_one_item_of_its_own_sequence(factor, max_work):
    launches, host = plans(factor, max_work=max_work)
    rows = np.concatenate([np.arange(*host.query_start_loc[s : s + 2]) for s in MANY])
    owners = np.repeat(np.arange(len(SPANS)), np.diff(host.query_start_loc))
    seen = np.zeros((host.num_rows, factor), int)
    row = 0
    for launch in launches:
        mine = rows[row : row + launch.num_rows]
        row += launch.num_rows
        plan, items = items_of(launch)
        for first_row, num_rows, end, table, first_vector, *_ in items:
            vectors = np.arange(first_vector, min(first_vector + 32, num_rows * factor))
            assert len(vectors) > 0
            batch_rows = mine[first_row + vectors // factor]
            np.add.at(seen, (batch_rows, vectors % factor), 1)
            positions = end - num_rows + vectors // factor
            np.testing.assert_array_equal(positions, host.positions[batch_rows])
            (owner,) = set(owners[batch_rows])
            blocks = -(-int(host.context_lens[owner]) // 16)
            expected = host.groups[0].block_tables[owner, :blocks]
            np.testing.assert_array_equal(plan[table : table + blocks], expected)
    assert row == len(rows)
    assert (seen[rows] == 1).all()
    assert seen.sum() == seen[rows].sum()


def test_no_launch_does_much_more_than_it_may():
    factor, max_work = 4, 3_000_000
    launches, host = plans(factor, max_work=max_work, spans=((0, 500), (300, 64)), chosen=[0, 1])
    assert len(launches) > 3
    rows = np.cumsum([0, *(launch.num_rows for launch in launches)])
    for first, end in itertools.pairwise(rows):
        work = (host.positions[first:end] + 1).sum() * factor * 2 * 128
        largest = 32 * (host.positions[first:end].max() + 1) * factor * 2 * 128
        assert work <= max_work + largest


def test_a_window_lets_a_launch_hold_more():
    spans = ((0, 500),)
    assert len(plans(4, None, 1 << 22, spans, [0])[0]) > len(plans(4, 16, 1 << 22, spans, [0])[0])


def test_the_longest_runs_start_first():
    _, items = items_of(plans(4)[0][0])
    assert (np.diff(items[:, 2]) <= 0).all()


@pytest.mark.parametrize("platform", Platform)
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("head_dim", range(16, MAX_MATRIX_HEAD_DIM + 1, 16))
def test_tiles_fit_in_threadgroup_memory(dtype, head_dim, columns, platform):
    memory = platform.threadgroup_bytes
    settings = {"columns": columns, "max_tile_bytes": memory}
    kernel = variant(dtype=dtype, k_head_dim=head_dim, **settings).kernel
    assert 0 < kernel.threadgroup_bytes <= memory


@pytest.mark.parametrize(
    ("dtype", "head_dim", "keys"),
    [("float16", 128, 32), ("float32", 96, 32), ("bfloat16", 192, 16), ("float32", 128, 16)],
)
def test_tiles_are_as_long_as_registers_and_memory_allow(dtype, head_dim, keys):
    assert variant(dtype=dtype, k_head_dim=head_dim).keys == keys


@pytest.mark.parametrize(
    ("dtype", "head_dim", "keys"),
    [("bfloat16", 128, 64), ("float16", 64, 64), ("float32", 128, 32)],
)
def test_tiles_on_cuda_are_twice_as_long_where_vectors_are_twice_as_many(dtype, head_dim, keys):
    pool = PoolShape(dtype, 2, head_dim, head_dim, block_size=16)
    layer = DecodeVariant(pool, dtype, factor=4)
    planner = DecodePlanner(Platform.CUDA, 8, False, DecodePath.AUTO, CascadePath.OFF, columns=None)
    assert planner.prefill_variant(layer).keys == keys
