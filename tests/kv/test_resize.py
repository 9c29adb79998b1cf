"""Arrays get another length, as many of them together as memory allows."""

from __future__ import annotations

import gc
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.kv import store as kv_store
from pagedmlx.kv.layout import KVLayout, LayerShape
from pagedmlx.kv.resize import set_length, with_length
from pagedmlx.kv.store import KVStore

ROW_BYTES = 2 * 3 * 4
MOST, SLAB = (40, 12), 4
"""Blocks of both groups of ``make_store``."""


def make_store(scale: int = 1) -> KVStore:
    """Three layers in one group and two in another; a block of an array has 32 bytes by scale."""
    layers = (LayerShape(1, 2 * scale, 2 * scale),) * 5
    groups = (
        KVGroup(KVGroupKind.FULL, (0, 1, 2)),
        KVGroup(KVGroupKind.WINDOW, (3, 4), 8),
    )
    return KVStore(KVLayout(4, "float32", layers, groups), MOST, float("nan"), slab_blocks=SLAB)


def lengths(store: KVStore, group: int) -> list[int]:
    pools = [store._pools[layer] for layer in store.layout.groups[group].layers]
    return [array.shape[0] for pool in pools for array in (pool.keys, pool.values)]


def watch(
    monkeypatch: pytest.MonkeyPatch, allows: Callable[[list[mx.array]], bool] = lambda _: True
) -> list[int]:
    """Arrays that were evaluated together, and refused as by a device without memory."""
    counts: list[int] = []
    evaluate = mx.eval

    def count(*arrays: list[mx.array] | mx.array) -> None:
        if isinstance(arrays[0], list):
            if not allows(arrays[0]):
                raise RuntimeError("[malloc] no memory")
            counts.append(len(arrays[0]))
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", count)
    return counts


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_a_longer_array_has_its_type_and_a_short_one_its_beginning(dtype: mx.Dtype) -> None:
    array = mx.random.normal((5, 2, 3)).astype(dtype)
    assert with_length(array, 5, 0.5) is array
    for length in (1, 4, 6, 50):
        changed = with_length(array, length, 0.5)
        assert (changed.dtype, changed.shape) == (dtype, (length, 2, 3))
        assert mx.array_equal(changed[:5], array[:length])
        assert (changed[5:] == 0.5).all()


@pytest.mark.parametrize(
    ("length", "spare_rows", "together"),
    [
        # Long and short are there at once: so the shorter counts.
        (9, 0, [1, 1, 1, 1, 1]),
        (9, 8, [1, 1, 1, 1, 1]),
        (9, 9, [2, 2, 1]),
        (9, 18, [4, 1]),
        (9, 100, [5]),
        (2, 5, [2, 2, 1]),
        (2, 10, [5]),
        (5, 0, [1, 1, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize("is_spare", [True, False])
def test_as_many_arrays_are_copied_together_as_there_is_memory_for(
    length: int,
    spare_rows: int,
    together: list[int],
    is_spare: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrays = [mx.full((rows, 2, 3), float(rows)) for rows in (4, 5, 4, 5, 4)]
    before = [mx.array(each) for each in arrays]
    longer = sum(max(length, each.shape[0]) for each in arrays)
    most, spare = (0, spare_rows) if is_spare else (longer + spare_rows, 0)
    counts = watch(monkeypatch)
    set_length(arrays, length, 0.5, most_bytes=most * ROW_BYTES, spare_bytes=spare * ROW_BYTES)
    assert counts == together
    for old, new in zip(before, arrays, strict=True):
        kept = min(length, old.shape[0])
        assert new.shape == (length, 2, 3)
        assert mx.array_equal(new[:kept], old[:kept])
        assert (new[kept:] == 0.5).all()


@pytest.mark.parametrize(
    ("before", "group", "num_blocks", "resize_bytes", "together"),
    [
        # What all blocks but those there are take is left: 8 of the other group, here.
        ((16, 4), 0, 40, 0, [2, 2, 2]),
        ((40, 4), 0, 16, 0, [2, 2, 2]),
        ((16, 4), 0, 28, 0, [6]),
        # A slab, where all blocks are there: each has as many bytes as 24 blocks of an array.
        ((8, 12), 0, 40, 1 << 20, [3, 3]),
        ((40, 12), 0, 8, 1 << 20, [3, 3]),
        ((8, 12), 0, 40, 16 * 32, [2, 2, 2]),
        # In the other group as 16.
        ((40, 8), 1, 12, 1 << 20, [2, 2]),
    ],
)
def test_a_pool_takes_no_more_than_all_blocks_or_a_slab_while_it_is_resized(
    before: tuple[int, int],
    group: int,
    num_blocks: int,
    resize_bytes: int,
    together: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = make_store()
    for each, count in enumerate(before):
        store.fit(each, count)
    monkeypatch.setattr(kv_store, "RESIZE_BYTES", resize_bytes)
    counts = watch(monkeypatch)
    store.fit(group, num_blocks)
    assert counts == together
    assert set(lengths(store, group)) == {num_blocks}


@pytest.mark.parametrize("num_blocks", [40, 28, 8])
def test_where_there_is_less_memory_arrays_are_copied_one_by_one(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    store.fit(0, 20)
    with monkeypatch.context() as patched:
        counts = watch(patched, lambda arrays: len(arrays) == 1)
        store.fit(0, num_blocks)
    assert counts == [1] * 6
    assert lengths(store, 0) == [num_blocks] * 6


@pytest.mark.parametrize("then", [40, 24, 20, 12, 4])
@pytest.mark.parametrize("num_blocks", [36, 8])
@pytest.mark.parametrize("num_allowed", range(6))
def test_what_failed_midway_can_go_on_or_be_undone(
    num_allowed: int, num_blocks: int, then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store, "RESIZE_BYTES", 0)
    store = make_store(scale=512)
    store.fit(0, 20)
    rows = {layer: mx.random.normal((12, 1, 1024)) for layer in (0, 1, 2, 3)}
    for layer, each in rows.items():
        store.write(layer, each, -each, mx.arange(12, dtype=mx.int64))
    store.commit()
    left = [num_allowed]

    def allows(arrays: list[mx.array]) -> bool:
        left[0] -= len(arrays) == 1
        return len(arrays) == 1 and left[0] >= 0

    with monkeypatch.context() as patched:
        watch(patched, allows)
        with pytest.raises(RuntimeError, match="memory"):
            store.fit(0, num_blocks)
    assert lengths(store, 0) == [num_blocks] * num_allowed + [20] * (6 - num_allowed)
    shorter = min(num_blocks, 20) if num_allowed else 20
    assert store.num_blocks == [shorter, SLAB]
    assert not store.has_room(0, shorter + 1)
    # What is too long can be given back.
    is_even = num_allowed == 0
    assert [store.fits(0, count) for count in (20, num_blocks)] == [is_even, False]
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory() - store.num_bytes
    mx.reset_peak_memory()
    store.fit(0, then)
    array_bytes = 512 * 32
    most = 40 * 6 * array_bytes + 12 * 4 * array_bytes
    assert mx.get_peak_memory() - before <= most + 40 * array_bytes
    assert store.num_blocks == [then, SLAB]
    assert store.fits(0, then)
    assert lengths(store, 0) == [then] * 6
    kept = 4 * min(then, shorter, 3)
    for layer, each in rows.items():
        kept_here = 12 if layer == 3 else kept
        k, v = store.gather_slots(layer, mx.arange(kept_here, dtype=mx.int64)[None])
        assert mx.array_equal(k[0, 0], each[:kept_here, 0])
        assert mx.array_equal(v[0, 0], -each[:kept_here, 0])
    assert store.num_bytes == sum(
        count * store.layout.block_bytes(group) for group, count in enumerate(store.num_blocks)
    )
    assert np.isnan(np.array(store._pools[0].keys[3:])).all()


def test_a_group_without_layers_has_the_blocks_that_are_asked_for() -> None:
    layout = KVLayout(4, "float32", (), (KVGroup(KVGroupKind.FULL, ()),))
    store = KVStore(layout, (40,), slab_blocks=SLAB)
    for num_blocks in (20, 40, 8):
        store.fit(0, num_blocks)
        assert store.num_blocks == [num_blocks]
        assert store.fits(0, num_blocks)
