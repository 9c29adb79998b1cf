from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.kv.layout import AxisOrder, KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from tests.support.batches import make_batch
from tests.support.graphs import operations

BLOCK_SIZE = 4


@pytest.fixture(params=AxisOrder)
def store(request: pytest.FixtureRequest) -> KVStore:
    layout = KVLayout(
        block_size=BLOCK_SIZE,
        dtype="float32",
        layers=(LayerShape(2, 3, 5), LayerShape(1, 4, 4), LayerShape(2, 3, 5)),
        groups=(KVGroup(KVGroupKind.FULL, (0, 2)), KVGroup(KVGroupKind.WINDOW, (1,), window=8)),
        order=request.param,
    )
    return KVStore(layout, (6, 3), fill=float("nan"))


def test_rows_come_back_in_the_order_of_the_table(store: KVStore) -> None:
    keys, values = _rows(store, 0, 6)
    # Blocks 5, 2: tokens 0..3 in block 5, tokens 4 and 5 in block 2.
    store.write(0, keys, values, _slots([20, 21, 22, 23, 8, 9]))
    k, v = store.gather(0, mx.array([[5, 2]], dtype=mx.int32))
    assert k.shape == (1, 2, 8, 3)
    assert v.shape == (1, 2, 8, 5)
    assert mx.array_equal(k[0, :, :6].swapaxes(0, 1), keys)
    assert mx.array_equal(v[0, :, :6].swapaxes(0, 1), values)
    assert mx.isnan(k[:, :, 6:]).all()


def test_a_pool_that_grows_and_shrinks_keeps_what_is_in_its_blocks(store: KVStore) -> None:
    grown = KVStore(store.layout, (6, 3), float("nan"), slab_blocks=2)
    assert grown.num_blocks == [2, 2]
    keys, values = _rows(store, 0, 6)
    first, last = _slots([4, 5, 6, 7]), _slots([18, 19])
    grown.write(0, keys[:4], values[:4], first)
    with pytest.raises(IndexError, match="within"):
        grown.copy_blocks(0, np.array([0], np.int32), np.array([4], np.int32))
    assert not grown.has_room(0, 5)
    grown.fit(0, 5)
    assert grown.num_blocks == [6, 2]
    grown.write(0, keys[4:], values[4:], last)
    everything = mx.arange(6, dtype=mx.int32)[None]
    k, v = grown.gather(0, everything)
    assert np.flatnonzero(~np.isnan(np.array(k[0, 0, :, 0]))).tolist() == [4, 5, 6, 7, 18, 19]
    assert mx.array_equal(k[0, :, 4:8].swapaxes(0, 1), keys[:4])
    assert mx.array_equal(v[0, :, 18:20].swapaxes(0, 1), values[4:])
    grown.commit()
    assert grown.fits(0, 6)
    assert not grown.fits(0, 2)
    grown.fit(0, 2)
    assert grown.num_blocks == [2, 2]
    k, v = grown.gather(0, everything[:, :2])
    assert mx.array_equal(k[0, :, 4:8].swapaxes(0, 1), keys[:4])
    assert mx.array_equal(v[0, :, 4:8].swapaxes(0, 1), values[:4])
    # The last slab of the other group is cut to what it may have.
    grown.fit(1, 3)
    assert grown.num_blocks == [2, 3]


def test_a_pool_that_cannot_grow_keeps_what_it_had(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = KVStore(store.layout, (6, 3), float("nan"), slab_blocks=2)
    keys, values = _rows(store, 2, 2)
    grown.write(2, keys, values, _slots([4, 5]))
    calls = iter(range(10))
    full = mx.full

    def refuse(*args: Any, **kwargs: Any) -> mx.array:
        if next(calls) >= 1:
            raise RuntimeError("[malloc] no")
        return full(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(mx, "full", refuse)
        with pytest.raises(RuntimeError, match="malloc"):
            grown.fit(0, 3)
    assert grown.num_blocks == [2, 2]
    grown.fit(0, 3)
    assert grown.num_blocks == [4, 2]
    k, v = grown.gather(2, mx.array([[1]], dtype=mx.int32))
    assert mx.array_equal(k[0, :, :2].swapaxes(0, 1), keys)
    assert mx.array_equal(v[0, :, :2].swapaxes(0, 1), values)


def test_single_slots_are_read_in_any_order_and_more_than_once(store: KVStore) -> None:
    keys, values = _rows(store, 0, 6)
    store.write(0, keys, values, _slots([20, 21, 22, 23, 8, 9]))
    k, v = store.gather_slots(0, mx.array([[9, 20], [23, 23]], dtype=mx.int64))
    for row, tokens in enumerate(([5, 0], [3, 3])):
        assert mx.array_equal(k[row].swapaxes(0, 1), keys[mx.array(tokens)])
        assert mx.array_equal(v[row].swapaxes(0, 1), values[mx.array(tokens)])


def test_layers_share_the_places_of_slots_unless_their_heads_differ(store: KVStore) -> None:
    slots = _slots([9, 2])
    for layer in (0, 1, 2):
        keys, values = _rows(store, layer, 2, seed=layer)
        store.write(layer, keys, values, slots)
        k, v = store.gather_slots(layer, slots[None])
        assert mx.array_equal(k[0].swapaxes(0, 1), keys)
        assert mx.array_equal(v[0].swapaxes(0, 1), values)
    asked = slots[None]
    found = [array for layer in (0, 2) for array in store.gather_slots(layer, asked)]
    shared = "FloorDivide" if store.layout.order is AxisOrder.HEAD_MAJOR else "Arange"
    store.commit()
    assert operations(*found)[shared] == 1
    assert not store._rows


def test_a_write_touches_its_own_slots_and_layer_only(store: KVStore) -> None:
    store.write(0, *_rows(store, 0, 2), _slots([3, 9]))
    everything = mx.arange(6, dtype=mx.int32)[None]
    k, v = store.gather(0, everything)
    live = ~mx.isnan(k[0, 0, :, 0])
    assert np.flatnonzero(np.array(live)).tolist() == [3, 9]
    assert np.flatnonzero(~np.isnan(np.array(v[0, 1, :, 4]))).tolist() == [3, 9]
    assert mx.isnan(store.gather(2, everything)[0]).all()


def test_a_gather_sees_the_writes_before_it_and_none_after(store: KVStore) -> None:
    table, slots = mx.array([[1]], dtype=mx.int32), _slots([4])
    old, new = _rows(store, 0, 1), _rows(store, 0, 1, seed=1)
    store.write(0, *old, slots)
    before, _ = store.gather(0, table)
    store.write(0, *new, slots)
    after, _ = store.gather(0, table)
    assert mx.array_equal(before[0, :, 0], old[0][0])
    assert mx.array_equal(after[0, :, 0], new[0][0])


def test_values_are_stored_in_the_pools_type(store: KVStore) -> None:
    half = KVStore(replace(store.layout, dtype="float16"), (6, 3))
    keys, values = _rows(store, 0, 1)
    half.write(0, keys, values, _slots([0]))
    k, _ = half.gather(0, mx.array([[0]], dtype=mx.int32))
    assert k.dtype == mx.float16
    assert mx.array_equal(k[0, :, 0], keys[0].astype(mx.float16))


def test_blocks_are_copied_in_every_layer_of_the_group_and_no_other(store: KVStore) -> None:
    for layer, count in ((0, 24), (2, 24), (1, 12)):
        store.write(layer, *_rows(store, layer, count, seed=layer), _slots(range(count)))
    tables = {layer: mx.arange(6 if layer != 1 else 3)[None] for layer in (0, 1, 2)}
    before = {layer: store.gather(layer, tables[layer]) for layer in (0, 1, 2)}
    mx.eval(before)
    store.copy_blocks(0, _ids([0, 0, 3]), _ids([1, 5, 2]))
    moved = mx.array([[0, 0, 3, 3, 4, 0]], dtype=mx.int32)
    for layer in (0, 2):
        for pool in (0, 1):
            was, now = before[layer][pool], store.gather(layer, tables[layer])[pool]
            blocks = was.reshape(was.shape[1], 6, BLOCK_SIZE, -1)[:, moved[0]]
            assert mx.array_equal(now.reshape(blocks.shape), blocks)
    assert mx.array_equal(store.gather(1, tables[1])[0], before[1][0])


def test_copies_happen_as_if_all_at_once(store: KVStore) -> None:
    keys, values = _rows(store, 0, 8)
    store.write(0, keys, values, _slots(range(8)))
    store.write(2, keys, values, _slots(range(8)))
    store.copy_blocks(0, _ids([0, 1]), _ids([1, 0]))
    k, _ = store.gather(0, mx.array([[1, 0]], dtype=mx.int32))
    assert mx.array_equal(k[0].swapaxes(0, 1), keys)


def test_a_copy_sees_writes_that_are_still_pending_and_later_writes_win(store: KVStore) -> None:
    for layer in (0, 2):
        store.write(layer, *_rows(store, 0, 4), _slots(range(4)))
    store.copy_blocks(0, _ids([0]), _ids([3]))
    keys, values = _rows(store, 0, 1, seed=9)
    store.write(0, keys, values, _slots([13]))
    k, _ = store.gather(0, mx.array([[3]], dtype=mx.int32))
    original = _rows(store, 0, 4)[0]
    assert mx.array_equal(k[0, :, 1], keys[0])
    assert mx.array_equal(k[0, :, 2], original[2])


@pytest.mark.parametrize(
    ("src", "dst", "error", "message"),
    [
        ([0], [6], IndexError, r"block ids 6 to 6 must be within \[0, 6\)"),
        ([-1], [1], IndexError, "block ids -1 to -1"),
        ([0, 1], [2, 2], ValueError, "a block is named twice among 2"),
        ([0, 1], [2], ValueError, "2 blocks to copy from, 1 to copy to"),
    ],
)
def test_impossible_copies_are_refused(
    store: KVStore, src: list[int], dst: list[int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        store.copy_blocks(0, _ids(src), _ids(dst))


def test_no_copies_are_no_work(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Mock(wraps=store._writer)
    monkeypatch.setattr(store, "_writer", writer)
    store.copy_blocks(0, _ids([]), _ids([]))
    assert writer.method_calls == []
    for layer in (0, 2):
        store.write(layer, *_rows(store, layer, 1), _slots([0]))
    store.copy_blocks(0, _ids([0]), _ids([1]))
    assert "copy_blocks" in [name for name, *_ in writer.method_calls]


def test_a_step_with_ids_outside_the_pool_or_repeated_slots_is_refused(store: KVStore) -> None:
    host = make_batch(
        [(2, 1), (0, 6)], block_size=BLOCK_SIZE, num_blocks=6, rng=np.random.default_rng(0)
    )
    arrays = host.groups[0]
    store.check(0, arrays)
    with pytest.raises(IndexError, match=r"slot ids .* must be within \[0, 12\)"):
        store.check(1, replace(arrays, slot_mapping=np.array([0, 12])))
    with pytest.raises(IndexError, match="block ids"):
        store.check(0, replace(arrays, block_tables=arrays.block_tables + 6))
    with pytest.raises(ValueError, match="a slot is named twice among 3"):
        store.check(0, replace(arrays, slot_mapping=np.array([4, 7, 4])))


def test_layers_of_no_group_have_no_place_in_the_pool() -> None:
    layout = KVLayout(
        block_size=BLOCK_SIZE,
        dtype="float32",
        layers=(LayerShape(1, 2, 2), LayerShape(0, 0, 0)),
        groups=(KVGroup(KVGroupKind.FULL, (0,)),),
    )
    store = KVStore(layout, (2,))
    with pytest.raises(KeyError):
        store.gather(1, mx.array([[0]], dtype=mx.int32))


def _rows(store: KVStore, layer: int, count: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    shape = store.layout.layers[layer]
    key = mx.random.key(seed)
    return (
        mx.random.normal((count, shape.num_kv_heads, shape.k_head_dim), key=key),
        mx.random.normal((count, shape.num_kv_heads, shape.v_head_dim), key=key),
    )


def _slots(slots: list[int] | range) -> mx.array:
    return mx.array(list(slots), dtype=mx.int64)


def _ids(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)
