"""No step may copy a pool array: seen in MLX's peak memory, with arrays too big to overlook."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.kv.layout import AxisOrder, KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.ops import make_backend
from pagedmlx.ops.base import AttentionBackend, AttentionParams, PagedBatch
from tests.support.batches import make_batch

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 16, 8192, 3
SHAPE = LayerShape(num_kv_heads=2, k_head_dim=64, v_head_dim=64)
ARRAY_BYTES = NUM_BLOCKS * BLOCK_SIZE * 2 * 64 * 4  # 64 MiB
NUM_SEQS = 4


@pytest.fixture(params=AxisOrder)
def store(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    layout = KVLayout(
        block_size=BLOCK_SIZE,
        dtype="float32",
        layers=(SHAPE,) * NUM_LAYERS,
        groups=(KVGroup(KVGroupKind.FULL, tuple(range(NUM_LAYERS))),),
        order=request.param,
    )
    yield KVStore(layout, (NUM_BLOCKS,))
    mx.clear_cache()


def test_two_hundred_decode_steps_with_block_copies_never_copy_a_pool_array(
    store: KVStore,
) -> None:
    backend = make_backend("gather")
    baseline = _reset_peak()
    for step in range(200):
        _decode_step(store, backend, step)
    assert mx.get_peak_memory() - baseline < ARRAY_BYTES // 4


def test_the_detector_sees_the_copy_that_a_held_read_causes(store: KVStore) -> None:
    backend = make_backend("gather")
    _decode_step(store, backend, 0)
    held, _ = store.gather(0, mx.array([[0]], dtype=mx.int32))
    baseline = _reset_peak()
    _decode_step(store, backend, 1)
    assert mx.get_peak_memory() - baseline >= ARRAY_BYTES
    del held


def test_the_pool_is_as_large_as_its_blocks_need_and_never_takes_more_than_all_blocks() -> None:
    layout = KVLayout(
        block_size=BLOCK_SIZE,
        dtype="float32",
        layers=(SHAPE,) * NUM_LAYERS,
        groups=(KVGroup(KVGroupKind.FULL, tuple(range(NUM_LAYERS))),),
    )
    baseline = _reset_peak()
    store = KVStore(layout, (NUM_BLOCKS,), slab_blocks=NUM_BLOCKS // 8)
    slab_bytes = 2 * NUM_LAYERS * ARRAY_BYTES // 8
    room = ARRAY_BYTES // 100
    for num_blocks, slabs in ((1, 1), (1100, 2), (NUM_BLOCKS, 8), (4000, 4), (0, 1)):
        before = _reset_peak()
        store.fit(0, num_blocks)
        assert store.num_blocks == [slabs * NUM_BLOCKS // 8]
        assert store.num_bytes == slabs * slab_bytes
        larger = max(before, mx.get_active_memory())
        # Some arrays are there twice, long and short: one, or as many as one slab has room for.
        most = max(larger + max(ARRAY_BYTES, slab_bytes), baseline + 8 * slab_bytes)
        assert mx.get_peak_memory() <= most + room
        assert abs(mx.get_active_memory() - baseline - slabs * slab_bytes) < room
    mx.clear_cache()


def _reset_peak() -> int:
    # What other tests left behind must not be freed later, when it would hide an allocation.
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def _decode_step(store: KVStore, backend: AttentionBackend, step: int) -> None:
    """One row for each sequence through every layer; a block is copied on each fifth step."""
    host = make_batch(
        [(100 + step, 1)] * NUM_SEQS,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        rng=np.random.default_rng(7),
    )
    if step % 5 == 0:
        source = host.groups[0].block_tables[:, 0]
        store.copy_blocks(0, source, np.arange(NUM_SEQS, dtype=np.int32) + step)
    batch = PagedBatch(host)
    hidden = mx.ones((NUM_SEQS, 2, 64))
    for layer in range(NUM_LAYERS):
        store.write(layer, hidden, hidden, batch.groups[0].slot_mapping)
        # As a model with its own attention maths would have it: built, perhaps unused.
        store.gather(layer, batch.groups[0].block_tables)
        hidden = backend.attend(hidden, layer, 0, store, batch, AttentionParams(scale=0.1))
    store.commit(hidden)
