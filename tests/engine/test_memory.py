from __future__ import annotations

from typing import Any

import pytest

from pagedmlx.config import EngineConfig
from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.engine.memory import MAX_DEFAULT_POOL_BYTES, PoolPlan, device_memory_bytes, plan_pool
from pagedmlx.errors import InvalidRequestError
from pagedmlx.kv.layout import KVLayout, LayerShape

GIB = 1 << 30
LAYOUT = KVLayout(
    block_size=16,
    dtype="float16",
    layers=(LayerShape(2, 64, 64),) * 4,
    groups=(KVGroup(KVGroupKind.FULL, (0, 1, 2)), KVGroup(KVGroupKind.WINDOW, (3,), window=8)),
)
BLOCK_BYTES = 16 * 4 * 2 * 128 * 2


def plan(weights: int = GIB, device: int = 8 * GIB, **settings: Any) -> PoolPlan:
    on_gpu = settings.pop("on_gpu", True)
    return plan_pool(
        EngineConfig(**settings),
        LAYOUT,
        parameter_bytes=weights,
        headroom_bytes=GIB // 2,
        device_bytes=device,
        on_gpu=on_gpu,
    )


def test_the_number_of_blocks_goes_before_everything_else():
    pool = plan(num_blocks=10, kv_cache_memory=GIB)
    assert pool == PoolPlan((10, 10), BLOCK_BYTES, 10 * BLOCK_BYTES, 160, 64)


def test_a_number_of_bytes_is_never_exceeded():
    pool = plan(kv_cache_memory=10 * BLOCK_BYTES + 5)
    assert pool.num_blocks == (10, 10)


def test_unasked_the_pool_takes_what_is_left_up_to_a_limit():
    left = int(4 * GIB * 0.85) - GIB - GIB // 2
    assert plan(device=4 * GIB).num_blocks[0] == left // BLOCK_BYTES
    assert plan(device=64 * GIB).pool_bytes == MAX_DEFAULT_POOL_BYTES["gpu"]
    assert plan(device=64 * GIB, on_gpu=False).pool_bytes == MAX_DEFAULT_POOL_BYTES["cpu"]
    smaller = plan(device=4 * GIB, gpu_memory_utilization=0.6)
    assert smaller.pool_bytes < plan(device=4 * GIB).pool_bytes


@pytest.mark.parametrize(
    ("settings", "field", "number"),
    [
        ({"kv_cache_memory": 100}, "kv_cache_memory", "leaves 100 bytes"),
        ({"gpu_memory_utilization": 0.01}, "gpu_memory_utilization", "leaves 0 bytes"),
        ({"kv_cache_memory": 9 * GIB}, "kv_cache_memory", f"asks for {9 * GIB} bytes"),
        ({"num_blocks": 10**9}, "num_blocks", f"the device has {8 * GIB}"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(
    settings: dict[str, Any], field: str, number: str
):
    with pytest.raises(InvalidRequestError) as caught:
        plan(**settings)
    assert caught.value.field == field
    assert number in str(caught.value)
    assert caught.value.hint


def test_the_device_has_memory():
    assert device_memory_bytes() > GIB // 4
