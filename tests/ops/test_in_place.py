"""The in-place writer on the executed Metal source: what ``KVStore`` promises holds for it too."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.kv.layout import AxisOrder, KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import AttentionParams, PagedBatch
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from tests.metal.launcher import FiberLauncher
from tests.support.batches import make_batch

BLOCK_SIZE, NUM_BLOCKS = 4, 6


@pytest.fixture(params=AxisOrder)
def store(request: pytest.FixtureRequest) -> KVStore:
    layout = KVLayout(
        block_size=BLOCK_SIZE,
        dtype="float32",
        layers=(LayerShape(2, 4, 8), LayerShape(2, 4, 8)),
        groups=(KVGroup(KVGroupKind.FULL, (0, 1)),),
        order=request.param,
    )
    return KVStore(layout, (NUM_BLOCKS,), float("nan"), InPlaceWriter(FiberLauncher()))


@pytest.mark.parametrize("slots", [[3], [20, 21, 22, 23, 8, 9], list(range(10))])
def test_rows_land_in_their_slots_and_nowhere_else(store: KVStore, slots: list[int]) -> None:
    keys, values = _rows(len(slots))
    store.write(0, keys, values, mx.array(slots, dtype=mx.int64))
    for written, rows in zip(_contents(store, 0), (keys, values), strict=True):
        assert np.flatnonzero(~np.isnan(written[:, 0, 0])).tolist() == sorted(slots)
        assert np.array_equal(written[slots], np.array(rows))
    assert all(np.isnan(array).all() for array in _contents(store, 1))


def test_a_pool_that_grows_and_shrinks_is_written_where_it_is_now(store: KVStore) -> None:
    grown = KVStore(
        store.layout, (NUM_BLOCKS,), float("nan"), InPlaceWriter(FiberLauncher()), slab_blocks=2
    )
    keys, values = _rows(3)
    grown.write(0, keys[:1], values[:1], mx.array([5], dtype=mx.int64))
    grown.fit(0, NUM_BLOCKS)
    grown.write(0, keys[1:], values[1:], mx.array([6, 23], dtype=mx.int64))
    for written, rows in zip(_contents(grown, 0), (keys, values), strict=True):
        assert np.array_equal(written[[5, 6, 23]], np.array(rows))
    grown.fit(0, 2)
    grown.write(0, keys[2:], values[2:], mx.array([0], dtype=mx.int64))
    assert [array.shape[0] for array in grown.bind(0)[0].bound] == [2, 2]
    slots = mx.array([[5, 6, 0]], dtype=mx.int64)
    for found, rows in zip(grown.gather_slots(0, slots), (keys, values), strict=True):
        assert mx.array_equal(found[0].swapaxes(0, 1), rows)


def test_rows_are_converted_to_the_pools_type(store: KVStore) -> None:
    keys, values = (rows.astype(mx.bfloat16) for rows in _rows(2))
    store.write(0, keys, values, mx.array([1, 5], dtype=mx.int64))
    assert np.array_equal(_contents(store, 0)[0][[1, 5]], np.array(keys.astype(mx.float32)))


@pytest.mark.parametrize(
    ("src", "dst"),
    [([0], [3]), ([0, 0, 2], [1, 5, 3]), ([0, 1], [1, 0]), ([0, 1, 2, 4], [1, 2, 3, 5])],
    ids=["one", "twice", "exchanged", "chain"],
)
def test_blocks_are_copied_as_if_all_at_once(
    store: KVStore, src: list[int], dst: list[int]
) -> None:
    for layer in (0, 1):
        slots = mx.arange(NUM_BLOCKS * BLOCK_SIZE, dtype=mx.int64)
        store.write(layer, *_rows(NUM_BLOCKS * BLOCK_SIZE, seed=layer), slots)
    before = [_contents(store, layer) for layer in (0, 1)]
    store.copy_blocks(0, np.array(src, np.int32), np.array(dst, np.int32))
    sources = np.arange(NUM_BLOCKS)
    sources[dst] = src
    for layer in (0, 1):
        for old, new in zip(before[layer], _contents(store, layer), strict=True):
            blocks = old.reshape(NUM_BLOCKS, -1)
            assert np.array_equal(new.reshape(NUM_BLOCKS, -1), blocks[sources])


def test_later_writes_come_after_what_was_submitted(store: KVStore) -> None:
    slots = mx.array([4], dtype=mx.int64)
    first, second = _rows(1, seed=1), _rows(1, seed=2)
    store.write(0, *first, slots)
    before, _ = store.gather_slots(0, slots[None])
    store.submit(before)
    store.write(0, *second, slots)
    after, _ = store.gather_slots(0, slots[None])
    store.commit(after)
    assert mx.array_equal(before[0].swapaxes(0, 1), first[0])
    assert mx.array_equal(after[0].swapaxes(0, 1), second[0])


def test_the_arrays_stay_the_same_objects(store: KVStore) -> None:
    pool, token = store.bind(0)
    store.write(0, *_rows(1), mx.array([0], dtype=mx.int64))
    assert store.bind(0)[0] is pool
    assert store.bind(0)[1] is not token
    assert store.updates_in_place


def _rows(count: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    keys, values = mx.random.split(mx.random.key(seed))
    return mx.random.normal((count, 2, 4), key=keys), mx.random.normal((count, 2, 8), key=values)


def _contents(store: KVStore, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Every slot's K and V: (slots, heads, D)."""
    slots = mx.arange(NUM_BLOCKS * BLOCK_SIZE, dtype=mx.int64)[None]
    keys, values = store.gather_slots(layer, slots)
    return tuple(np.array(array[0].swapaxes(0, 1)) for array in (keys, values))  # type: ignore


@pytest.mark.parametrize("prefill", ["kernel", "split", "gather"])
def test_nobody_keeps_the_arrays_that_a_pool_had_before_it_grew(prefill: str) -> None:
    launcher = FiberLauncher()
    layout = KVLayout(
        block_size=16,
        dtype="float32",
        layers=(LayerShape(1, 64, 64),) * 2,
        groups=(KVGroup(KVGroupKind.FULL, (0, 1)),),
    )
    backend = KernelBackend(launcher, prefill=prefill)
    mx.clear_cache()
    gc.collect()
    gc.disable()
    try:
        base = mx.get_active_memory()
        store = KVStore(layout, (8_000,), 0.0, InPlaceWriter(launcher), slab_blocks=1_000)
        for num_blocks in (1_000, 3_000, 8_000, 1_000):
            store.fit(0, num_blocks)
            _compute_a_step(store, backend)
            assert mx.get_active_memory() - base <= store.num_bytes + (1 << 20)
    finally:
        gc.enable()


def _compute_a_step(store: KVStore, backend: KernelBackend) -> None:
    """Copy a block, then write and attend in every layer: decode rows and a chunk."""
    spans = [(20, 1), (17, 1), (40, 12)]
    batch = PagedBatch(
        make_batch(spans, block_size=16, num_blocks=16, rng=np.random.default_rng(0))
    )
    store.copy_blocks(0, np.array([14], np.int32), np.array([15], np.int32))
    rows = batch.host.num_rows
    output = mx.ones((rows, 2, 64))
    for layer in range(2):
        keys, values = (mx.ones((rows, 1, 64)) for _ in range(2))
        store.write(layer, keys, values, batch.groups[0].slot_mapping)
        output = backend.attend(output, layer, 0, store, batch, AttentionParams(scale=0.125))
    store.submit(output)
    store.commit()
