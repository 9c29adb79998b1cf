from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.kv.layout import KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.models.deferred_rope import DeferredRopes
from pagedmlx.models.hand_over import HandOver
from pagedmlx.models.layer_cache import GroupRows, LayerCache
from pagedmlx.models.parts import token_rows
from pagedmlx.ops import make_backend
from pagedmlx.ops.base import PagedBatch
from tests.support.batches import make_batch

BLOCK_SIZE, NUM_BLOCKS, HEADS, K_DIM, V_DIM = 4, 20, 2, 8, 6
SPANS = [(0, 1), (0, 9), (0, 14)]


class Step:
    """Three sequences from their first token on, in a pool full of NaN."""

    def __init__(self, window: int | None) -> None:
        kind = KVGroupKind.FULL if window is None else KVGroupKind.WINDOW
        layout = KVLayout(
            block_size=BLOCK_SIZE,
            dtype="float32",
            layers=(LayerShape(HEADS, K_DIM, V_DIM),),
            groups=(KVGroup(kind, (0,), window),),
        )
        rng = np.random.default_rng(0)
        self.host = make_batch(SPANS, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, rng=rng)
        self.store = KVStore(layout, (NUM_BLOCKS,), fill=float("nan"))
        part, backend = token_rows(PagedBatch(self.host)), make_backend("auto")
        rows = GroupRows(self.store, backend, part, 0, window, DeferredRopes(), HandOver())
        self.cache = LayerCache(0, rows)
        num_rows = self.host.num_rows
        self.keys = rng.normal(size=(num_rows, HEADS, 1, K_DIM)).astype(np.float32)
        self.values = rng.normal(size=(num_rows, HEADS, 1, V_DIM)).astype(np.float32)

    def update(self) -> tuple[mx.array, mx.array]:
        return self.cache.update_and_fetch(mx.array(self.keys), mx.array(self.values))


@pytest.mark.parametrize("window", [None, 5])
def test_attention_reads_what_was_written_through_the_blocks(window: int | None) -> None:
    step = Step(window)
    keys, values = step.update()
    queries = mx.random.normal((step.host.num_rows, 4, 1, K_DIM), key=mx.random.key(1))
    assert not step.cache.attended
    output = step.cache.attend_blocks(queries, keys, values, 0.3, None, None)
    assert output is not None
    assert step.cache.attended
    for first, last in zip(step.host.query_start_loc, step.host.query_start_loc[1:], strict=False):
        rows = slice(int(first), int(last))
        arrays = (queries, mx.array(step.keys), mx.array(step.values))
        q, k, v = (array[rows].swapaxes(0, 2) for array in arrays)
        count = int(last - first)
        mask = mx.tri(count, dtype=mx.bool_)
        if window is not None:
            mask = mask & ~mx.tri(count, k=-window, dtype=mx.bool_)
        expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
        np.testing.assert_allclose(
            np.array(output[rows]), np.array(expected.swapaxes(0, 2)), atol=1e-5
        )


def test_only_the_arrays_that_were_fetched_stand_for_the_blocks() -> None:
    step = Step(None)
    queries = mx.zeros((step.host.num_rows, 4, 1, K_DIM))
    keys = mx.zeros((step.host.num_rows, HEADS, 1, K_DIM))
    assert step.cache.attend_blocks(queries, keys, keys, 1.0, None, None) is None
    keys, values = step.update()
    assert step.cache.attend_blocks(queries, keys * 2, values, 1.0, None, None) is None
    assert step.cache.attend_blocks(queries, keys, values * 2, 1.0, None, None) is None
    assert not step.cache.attended
    assert step.cache.attend_blocks(queries, keys, values, 1.0, None, None) is not None


def test_a_model_takes_it_for_a_plain_cache_with_a_position_for_each_row() -> None:
    step = Step(None)
    assert step.cache
    assert not hasattr(step.cache, "bits")
    assert step.cache.make_mask(1) is None
    assert step.cache.make_mask(1, window_size=5) is None
    mask = step.cache.make_mask(1, return_array=True)
    assert mask is not None
    assert mask.all()
    np.testing.assert_array_equal(np.array(step.cache.offset), step.host.positions)
    step.update()
    np.testing.assert_array_equal(np.array(step.cache.offset), step.host.positions + 1)
