"""What the scheduler says that prompts will need, and what a window needs at most."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.core.groups import KVGroup, Windows
from pagedmlx.core.step import Step
from tests.support.core import FULL, WINDOW, make_driver, make_request
from tests.support.schedules import SYSTEM, run_and_check, tokens


@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_window_s_pool_of_what_one_sequence_holds_is_enough_for_any(
    chunk: int, depth: int
) -> None:
    windows = Windows((FULL, WINDOW), 2, chunk)
    held = windows.num_held(1, 1000)
    driver = make_driver(
        40,
        2,
        groups=(FULL, WINDOW),
        window_blocks=held,
        prefill_chunk_size=chunk,
        depth=depth,
        min_partial_tokens=1,
    )
    prompt = (0, 1, 1, 0, 2, 0, 1, 2, 0, 0, 1, 1, 0, 2, 1, 0, 0, 1)
    # What is cached of the first is part of the second's blocks, and so on.
    for length in (6, 18, 9, 18):
        driver.add(make_request(prompt[:length], 8, request_id=f"r{len(driver.sequences)}", seed=0))
        driver.run()
    driver.check_outputs()
    driver.check_empty()


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    budget=st.integers(1, 64),
    groups=st.sampled_from([(FULL,), (FULL, WINDOW)]),
    prefix_caching=st.booleans(),
    depth=st.integers(0, 1),
)
def test_what_is_ahead_of_prompts_that_come_together_is_what_they_come_to_need(
    lengths: list[int],
    budget: int,
    groups: tuple[KVGroup, ...],
    prefix_caching: bool,
    depth: int,
) -> None:
    driver = make_driver(
        400,
        4,
        groups=groups,
        prefix_caching=prefix_caching,
        max_num_batched_tokens=budget,
        prefill_chunk_size=16,
        max_num_seqs=12,
        depth=depth,
    )
    for index, length in enumerate(lengths):
        driver.add(make_request(tokens(length, 100 * index), 16, request_id=f"{index}"))
    ahead: list[tuple[int, ...]] = []
    created: list[tuple[int, ...]] = []

    def look(_: Step) -> None:
        ahead.append(driver.scheduler.num_blocks_ahead())
        created.append(driver.kv.num_created_blocks)

    while any(sequence.num_output_tokens < 1 for sequence in driver.sequences):
        driver.step(between=look)
    # Those that came first may need more for their output by now.
    num_more = sum(driver.kv.num_blocks_for(s.num_output_tokens - 1) for s in driver.sequences)
    assert all(before <= after for before, after in pairwise(created))
    for group, count in enumerate(created[-1]):
        assert count <= ahead[0][group] + num_more
    if not any(sequence.is_finished for sequence in driver.sequences):
        # For each it is at most too many by a block to grow into, and one for the first token.
        assert ahead[0][0] <= created[-1][0] + 2 * len(lengths)


def test_a_long_queue_is_looked_at_only_as_far_as_it_may_run() -> None:
    driver = make_driver(1000, 4, max_num_seqs=3, max_num_batched_tokens=8)
    for index in range(50):
        driver.add(make_request(tokens(20, 100 * index), 1, request_id=f"{index}"))
    assert driver.scheduler.num_blocks_ahead() == (3 * 5,)
    driver.step()
    assert driver.scheduler.num_blocks_ahead() == (3 * 5,)
    run_and_check(driver)
    assert driver.scheduler.num_blocks_ahead() == driver.kv.num_created_blocks


def test_outputs_of_one_request_and_prompts_that_begin_alike_are_ahead_once() -> None:
    driver = make_driver(1000, 4, max_num_batched_tokens=8)
    driver.add(make_request((*SYSTEM, 1), 4, request_id="four", n=4))
    driver.add(make_request((*SYSTEM, 2, 3), 4, request_id="one more"))
    # The last block of each, and one to grow into unless its output ends in that.
    ahead = driver.scheduler.num_blocks_ahead()
    assert ahead == (4 + 5 * 1 + 1,)
    run_and_check(driver)
    assert driver.kv.num_created_blocks <= ahead


def test_outputs_of_one_request_are_ahead_once_without_a_prefix_cache_too() -> None:
    driver = make_driver(1000, 4, max_num_batched_tokens=8, prefix_caching=False)
    driver.add(make_request((*SYSTEM, 1), 4, request_id="four", n=4))
    ahead = driver.scheduler.num_blocks_ahead()
    assert ahead == (4 + 4 * 1,)
    run_and_check(driver)
    assert driver.kv.num_created_blocks <= ahead
