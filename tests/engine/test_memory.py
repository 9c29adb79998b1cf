from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.config import EngineConfig
from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.engine.memory import (
    KEPT_BYTES,
    MAX_CPU_POOL_BYTES,
    MIN_SLAB_BYTES,
    MIN_STEP_TOKENS,
    SMALL_CHUNK,
    STATE_ONLY_TOKENS,
    PoolPlan,
    device_memory_bytes,
    fit_chunk,
    fit_step,
    plan_pool,
)
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


# Without a window that passes blocks.
EVEN = replace(LAYOUT, groups=(KVGroup(KVGroupKind.FULL, (0, 1, 2, 3)),))


def plan(weights: int = GIB, device: int = 8 * GIB, **settings: Any) -> PoolPlan:
    on_gpu = settings.pop("on_gpu", True)
    layout = settings.pop("layout", EVEN)
    return plan_pool(
        EngineConfig(**settings),
        layout,
        parameter_bytes=weights,
        headroom_bytes=GIB // 2,
        device_bytes=device,
        on_gpu=on_gpu,
    )


def test_the_number_of_blocks_goes_before_everything_else():
    pool = plan(num_blocks=10, kv_cache_memory=GIB)
    assert pool == PoolPlan((10,), (10,), 10, BLOCK_BYTES, 10 * BLOCK_BYTES, 160, 64)


def test_a_number_of_bytes_is_never_exceeded():
    pool = plan(kv_cache_memory=10 * BLOCK_BYTES + 5)
    assert pool.num_blocks == (10,)


def test_unasked_the_pool_may_take_what_is_left():
    left = int(4 * GIB * 0.85) - GIB - GIB // 2
    assert plan(device=4 * GIB).num_blocks[0] == left // BLOCK_BYTES
    assert plan(device=64 * GIB).pool_bytes > 50 * GIB
    assert plan(device=64 * GIB, on_gpu=False).pool_bytes == MAX_CPU_POOL_BYTES
    smaller = plan(device=4 * GIB, gpu_memory_utilization=0.6)
    assert smaller.pool_bytes < plan(device=4 * GIB).pool_bytes


def test_cached_blocks_alone_take_no_more_than_a_limit_unless_the_size_is_given():
    kept = plan(device=64 * GIB).num_kept_blocks
    assert kept == (KEPT_BYTES // BLOCK_BYTES,)
    small = plan(device=4 * GIB)
    assert small.num_kept_blocks == small.num_blocks
    given = plan(device=64 * GIB, kv_cache_memory=20 * GIB)
    assert given.num_kept_blocks == given.num_blocks


def test_a_pool_grows_by_a_sixteenth_or_by_little():
    large = plan(kv_cache_memory=2 * GIB)
    assert abs(large.slab_blocks * 16 - large.num_blocks[0]) <= 16
    small = plan(kv_cache_memory=40 << 20)
    assert small.slab_blocks * BLOCK_BYTES - MIN_SLAB_BYTES in range(BLOCK_BYTES)
    assert plan(num_blocks=10).slab_blocks == 10


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


def test_a_group_whose_window_passes_gets_what_its_window_needs():
    bytes_of = [LAYOUT.block_bytes(group) for group in (0, 1)]
    for memory in (1 << 20, 10 << 20, GIB, 3 * GIB):
        pool = plan(layout=LAYOUT, kv_cache_memory=memory)
        full, windowed = pool.num_blocks
        assert full * bytes_of[0] + windowed * bytes_of[1] == pool.pool_bytes <= memory
        assert pool.pool_bytes > memory - 2 * sum(bytes_of)
        assert pool.capacity_tokens == full * 16
        # One chunk of 512 over a window of 8, and the chunk before it; or all.
        assert windowed >= min(full, 1024 // 16 + 1)
        assert windowed < full or full <= 65
    given = plan(layout=LAYOUT, num_blocks=1000)
    assert given.num_blocks == (1000, 1000)
    wide = replace(LAYOUT, groups=(LAYOUT.groups[0], KVGroup(KVGroupKind.WINDOW, (3,), 4096)))
    full, windowed = plan(layout=wide, kv_cache_memory=GIB).num_blocks
    assert 0.25 < windowed / full < 0.26


def test_windows_alone_keep_everything():
    alone = replace(LAYOUT, groups=(KVGroup(KVGroupKind.WINDOW, (0, 1, 2, 3), 8),))
    assert plan(layout=alone, kv_cache_memory=GIB) == plan(kv_cache_memory=GIB)


def test_the_device_has_memory():
    assert device_memory_bytes() > GIB // 4


STATES = replace(EVEN, state_bytes=100 * BLOCK_BYTES)


def test_states_come_out_of_the_pools_memory_and_take_half_of_it_at_most():
    plenty = plan(layout=STATES, kv_cache_memory=1000 * BLOCK_BYTES, max_num_seqs=3)
    assert (plenty.max_num_seqs, plenty.state_bytes) == (3, 300 * BLOCK_BYTES)
    assert plenty.num_blocks == (700,)
    tight = plan(layout=STATES, kv_cache_memory=1000 * BLOCK_BYTES)
    assert (tight.max_num_seqs, tight.num_blocks) == (5, (500,))


def test_states_come_on_top_of_a_given_number_of_blocks():
    pool = plan(layout=STATES, num_blocks=10, max_num_seqs=4)
    assert (pool.num_blocks, pool.max_num_seqs) == ((10,), 4)
    assert pool.state_bytes == 400 * BLOCK_BYTES
    with pytest.raises(InvalidRequestError, match="blocks and states"):
        plan(layout=STATES, num_blocks=10, max_num_seqs=10**6)


def test_blocks_that_take_no_memory_leave_it_all_to_states():
    layout = replace(STATES, groups=(KVGroup(KVGroupKind.FULL, ()),))
    pool = plan(layout=layout, kv_cache_memory=1000 * BLOCK_BYTES)
    assert (pool.max_num_seqs, pool.pool_bytes) == (10, 0)
    assert pool.capacity_tokens == STATE_ONLY_TOKENS
    assert plan(layout=layout, num_blocks=7).capacity_tokens == 7 * 16


def test_a_state_that_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(InvalidRequestError, match=f"state of {STATES.state_bytes}"):
        plan(layout=STATES, kv_cache_memory=50 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("spare", "tokens", "chunk"),
    [
        (4 * 2 * 2112, 2112, 512),  # half of it is twice what the step's 4.125 chunks need
        (4 * 2 * 2112 - 1, 1056, 512),
        (2112, 264, 264),
        (1, MIN_STEP_TOKENS, MIN_STEP_TOKENS),
    ],
)
def test_steps_leave_half_of_the_memory_to_the_pool(spare: int, tokens: int, chunk: int):
    tried: list[int] = []

    def measure(num_rows: int) -> int:
        tried.append(num_rows)
        return 2 * num_rows

    config, headroom = fit_step(EngineConfig(prefill_chunk_size=512), spare, measure)
    assert (config.max_num_batched_tokens, config.prefill_chunk_size) == (tokens, chunk)
    assert headroom == 2 * 2 * tokens
    assert tried == sorted(set(tried), reverse=True)
    assert tried[-1] == chunk


@pytest.mark.parametrize(
    ("wanted", "layout", "keeps_scores", "chunk"),
    [
        (None, EVEN, False, 2112),
        (None, EVEN, True, SMALL_CHUNK),
        (None, LAYOUT, False, SMALL_CHUNK),  # what a window has passed waits for the chunk's end
        (3000, EVEN, False, 2112),
        (700, LAYOUT, True, 700),
    ],
)
def test_chunks_are_what_suits_the_attention_unless_the_user_chose(
    wanted: int | None, layout: KVLayout, keeps_scores: bool, chunk: int
):
    config = fit_chunk(EngineConfig(prefill_chunk_size=wanted), layout, keeps_scores=keeps_scores)
    assert config.max_chunk == chunk


def test_steps_that_were_small_already_stay_as_they_are():
    config = EngineConfig(max_num_batched_tokens=5, prefill_chunk_size=3)
    assert fit_step(config, 0, lambda rows: rows) == (config, 2 * 5)


@pytest.mark.parametrize(
    ("tokens", "chunk", "headroom"),
    [
        (2048, 512, 2 * 4 * 5120),
        (2112, 512, 2 * (4 * 5120 + 640)),  # 64 streams are no fifth chunk
        (600, 512, 2 * 6000),
        (100, 100, 2 * 1000),
        (101, 100, 2 * 1010),
    ],
)
def test_what_a_step_has_beside_whole_chunks_counts_by_its_tokens(
    tokens: int, chunk: int, headroom: int
):
    config = EngineConfig(max_num_batched_tokens=tokens, prefill_chunk_size=chunk)
    assert fit_step(config, 10**9, lambda rows: 10 * rows) == (config, headroom)


def test_a_part_of_a_byte_is_one():
    config = EngineConfig(max_num_batched_tokens=70, prefill_chunk_size=64)
    assert fit_step(config, 10**9, lambda rows: 1)[1] == 2 * 2


@given(
    tokens=st.integers(1, 5000),
    chunk=st.none() | st.integers(1, 5000),
    spare=st.integers(0, 2_000_000),
    fixed=st.integers(0, 10_000),
    each=st.integers(1, 100),
)
def test_a_step_has_what_it_needs_and_is_as_large_as_half_of_the_memory_allows(
    tokens: int, chunk: int | None, spare: int, fixed: int, each: int
):
    wanted = EngineConfig(max_num_batched_tokens=tokens, prefill_chunk_size=chunk)

    def measure(rows: int) -> int:
        assert rows <= wanted.max_chunk
        return fixed + each * rows

    config, headroom = fit_step(wanted, spare, measure)
    found = config.max_num_batched_tokens
    needed = -(-measure(config.max_chunk) * found // config.max_chunk)
    assert headroom == 2 * needed
    # What a chunk takes whatever its size counts at least once.
    assert needed >= fixed + each * found
    assert min(tokens, MIN_STEP_TOKENS) <= found <= tokens
    assert config.max_chunk == min(wanted.max_chunk, found)
    assert 2 * headroom <= spare or found <= MIN_STEP_TOKENS
    if found == tokens:
        assert config == wanted
    else:
        # Twice as many, or all, were too many.
        tried = min(tokens, 2 * found + 1)
        rows = min(tried, wanted.max_chunk)
        assert 4 * -(-measure(rows) * tried // rows) > spare
