"""A rotation shared by layers gives what MLX's own gives to each."""

from __future__ import annotations

import mlx.core as mx
import pytest

from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.kv.layout import KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import FunctionalWriter, NewRows, Rope, Rotation
from tests.support.graphs import operations
from tests.support.token_writer import TokenWriter

FREQS = mx.array([1.0, 3.0, 40.0, 900.0])
ROPES = [
    Rope(8, False, 10000.0, 1.0),
    Rope(8, True, 10000.0, 0.25),
    Rope(8, False, None, 1.0, FREQS),
    Rope(4, True, 500.0, 1.0),
    Rope(4, False, 500.0, 1.0),
]
POSITIONS = mx.array([0, 7, 150, 4000, 99_999, 9, 9, 9], dtype=mx.int32)
LAYOUT = KVLayout(4, "float32", (LayerShape(2, 8, 8),) * 2, (KVGroup(KVGroupKind.FULL, (0, 1)),))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("rope", ROPES)
def test_rows_are_rotated_as_mlx_does_it(rope: Rope, dtype: mx.Dtype) -> None:
    rows = mx.random.normal((5, 6, 1, 8), key=mx.random.key(0)).astype(dtype)
    with mx.stream(mx.cpu):
        found = Rotation(rope, POSITIONS, 5, dtype).apply(rows)
        assert found.dtype == dtype
        assert mx.array_equal(found, rope.rotate(rows, POSITIONS))


def test_layers_share_sines_and_cosines_while_a_step_lasts() -> None:
    store, other = sharing_store(), Rope(8, False, None, 1.0, FREQS)
    rotated = [
        store.write_rotated(layer, new_rows(layer), rope)
        for rope in (ROPES[0], other, ROPES[0], other)
        for layer in (0, 1)
    ]
    assert operations(*rotated)["Cos"] == 2
    assert len(store._rotations) == 2
    store.commit(*rotated)
    assert not store._rotations


def test_another_rope_is_not_taken_for_the_one_before() -> None:
    store = sharing_store()
    other = Rope(8, False, None, 1.0, FREQS * 2)
    for rope in (*ROPES, other):
        rows = new_rows(0)
        found = store.write_rotated(0, rows, rope)
        keys, _ = store.gather_slots(0, rows.slots[None])
        assert mx.allclose(found, rope.rotate(rows.queries, POSITIONS), atol=1e-6)
        assert mx.allclose(keys[0].swapaxes(0, 1), rope.rotate(rows.keys, POSITIONS), atol=1e-6)


def test_rotations_are_shared_where_the_writer_says_so() -> None:
    assert sharing_store().can_rotate
    for writer in (FunctionalWriter(), TokenWriter()):
        assert not KVStore(LAYOUT, (4,), writer=writer).can_rotate


def sharing_store() -> KVStore:
    return KVStore(LAYOUT, (4,), writer=FunctionalWriter(shares_rotations=True))


def new_rows(seed: int) -> NewRows:
    keys = mx.random.split(mx.random.key(seed), 3)
    queries, new_keys, values = (
        mx.random.normal((5, heads, 1, 8), key=key)
        for heads, key in zip((6, 2, 2), keys, strict=True)
    )
    slots = mx.array([3, 8, 1, 12, 6], dtype=mx.int64)
    return NewRows(queries, new_keys, values, POSITIONS, slots)
