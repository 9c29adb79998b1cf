from __future__ import annotations

import pytest

from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.kv.layout import AxisOrder, KVLayout, LayerShape


@pytest.fixture
def groups() -> tuple[KVGroup, ...]:
    return (KVGroup(KVGroupKind.FULL, (0, 2)), KVGroup(KVGroupKind.WINDOW, (1,), window=8))


def test_shapes_follow_the_axis_order(groups: tuple[KVGroup, ...]) -> None:
    layers = (LayerShape(3, 64, 32), LayerShape(1, 8, 8), LayerShape(3, 64, 32))
    head_major = KVLayout(16, "float16", layers, groups)
    slot_major = KVLayout(16, "float16", layers, groups, AxisOrder.SLOT_MAJOR)
    assert head_major.order is AxisOrder.HEAD_MAJOR
    assert head_major.k_shape(0, 7) == (7, 3, 16, 64)
    assert head_major.v_shape(0, 7) == (7, 3, 16, 32)
    assert slot_major.k_shape(0, 7) == (7, 16, 3, 64)
    assert slot_major.v_shape(1, 5) == (5, 16, 1, 8)


def test_bytes_count_k_and_v_of_the_layers_of_one_group(groups: tuple[KVGroup, ...]) -> None:
    layers = (LayerShape(3, 64, 32), LayerShape(1, 8, 8), LayerShape(2, 64, 32))
    layout = KVLayout(16, "float16", layers, groups)
    assert layout.token_bytes(0) == (3 * 96 + 2 * 96) * 2
    assert layout.token_bytes(1) == 16 * 2
    assert layout.block_bytes(1) == 16 * 2 * 16
