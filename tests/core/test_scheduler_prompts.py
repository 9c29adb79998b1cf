"""Who gets how many tokens of a step for its prompt, beside streams and beside each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.core.scheduler import LONE_CHUNK
from tests.support.core import Driver, NoGrammar, make_driver, make_request
from tests.support.schedules import (
    first_prompt_gets_on,
    prompt_tokens,
    run_and_check,
    tokens,
)


@pytest.mark.parametrize("budget", [23, 40])
def test_chunks_beside_streams_end_at_round_positions(budget: int) -> None:
    """On CUDA each shape of a chunk has a price, so few should occur."""
    driver = make_driver(
        256, 4, max_num_batched_tokens=budget, prefill_chunk_size=32, chunk_multiple=16
    )
    for index in range(5):
        driver.add(make_request(tokens(3, 1000 * index), 30, request_id=f"stream {index}"))
    driver.step()
    (sequence,) = driver.add(make_request(tokens(203, 9000), 2, request_id="long"))
    run_and_check(driver)
    entries = [e for step in driver.steps for e in step.scheduled if e.sequence is sequence]
    ends = [e.start + e.num_tokens for e in entries if e.start < 203]
    assert len(ends) > 5
    assert ends[-1] == 203
    assert all(end % 16 == 0 for end in ends[:-1])


def test_a_long_prompt_never_stalls_those_that_run() -> None:
    driver = make_driver(64, 4, prefill_chunk_size=8, max_num_batched_tokens=16)
    (running,) = driver.add(make_request(tokens(3), 40, request_id="running"))
    driver.step()
    (long,) = driver.add(make_request(tokens(60, 500), 2, request_id="long"))
    chunks: list[int] = []
    while long.num_output_tokens == 0:
        step = driver.step()
        assert step is not None
        assert step.scheduled[0].sequence is running
        chunks += [e.num_tokens for e in step.scheduled if e.sequence is long]
    assert chunks == [8] * 7 + [4]
    run_and_check(driver)


def test_prompts_beside_a_stream_share_a_limit_so_that_short_ones_do_not_wait_for_long_ones() -> (
    None
):
    driver = make_driver(128, 4, max_num_batched_tokens=64)
    driver.scheduler.max_prompt_tokens = 12
    driver.add(make_request(range(8), 60, request_id="stream"))
    assert prompt_tokens(driver) == {"stream": 8}  # nobody waits, so nothing is limited
    driver.add(make_request(range(10, 110), 4, request_id="long"))
    # Alone it gets all that there is.
    assert prompt_tokens(driver) == {"stream": 0, "long": 12}
    driver.add(make_request(range(200, 203), 9, request_id="short"))
    driver.add(make_request(range(300, 350), 4, request_id="second"))
    # Newcomers get half, in their order; what they leave goes to the first.
    assert prompt_tokens(driver) == {"stream": 0, "short": 3, "second": 3, "long": 6}
    assert prompt_tokens(driver) == {"stream": 0, "short": 0, "second": 6, "long": 6}
    driver.scheduler.max_prompt_tokens = None
    assert prompt_tokens(driver) == {"stream": 0, "short": 0, "long": 62}
    driver.run()
    driver.check_outputs()


def test_a_stream_that_skips_a_step_waits_for_no_more_prompt_tokens_than_others() -> None:
    driver = make_driver(1024, 4, max_num_batched_tokens=2048, prefill_chunk_size=2048, depth=1)
    driver.scheduler.max_prompt_tokens = 12
    driver.add(make_request(range(8), 60, request_id="stream", grammar=NoGrammar()))
    assert prompt_tokens(driver) == {"stream": 8}
    driver.add(make_request(range(3600), 4, request_id="long"))
    steps = [prompt_tokens(driver) for _ in range(6)]
    assert {"long": 12} in steps
    assert {"stream": 0, "long": 12} in steps
    assert max(step.get("long", 0) for step in steps) == 12


def test_a_prompt_that_no_stream_waits_for_takes_what_is_quick_or_a_fixed_number() -> None:
    driver = make_driver(1024, 4, max_num_batched_tokens=2048, prefill_chunk_size=2048)
    driver.add(make_request(range(3600), 4, request_id="long"))
    # Whoever comes meanwhile waits for the step.
    for limit, expected in ((4, LONE_CHUNK), (700, 700), (None, 2048)):
        driver.scheduler.max_prompt_tokens = limit
        assert prompt_tokens(driver) == {"long": expected}


def test_what_others_leave_is_no_start_of_a_long_prompt() -> None:
    driver = make_driver(256, 4, max_num_batched_tokens=19, prefill_chunk_size=16)
    for index, name in enumerate(("first", "second")):
        driver.add(make_request(tokens(40, 1000 * index), 2, request_id=name))
    assert prompt_tokens(driver) == {"first": 16}
    assert prompt_tokens(driver) == {"first": 16}
    # What is left behind a prompt's end is enough.
    assert prompt_tokens(driver) == {"first": 8, "second": 11}
    assert prompt_tokens(driver) == {"first": 0, "second": 16}
    run_and_check(driver)


def test_a_quarter_of_a_chunk_is_a_start() -> None:
    driver = make_driver(256, 4, max_num_batched_tokens=20, prefill_chunk_size=16)
    for index, name in enumerate(("first", "second")):
        driver.add(make_request(tokens(40, 1000 * index), 2, request_id=name))
    for _ in range(2):
        assert prompt_tokens(driver) == {"first": 16, "second": 4}
    run_and_check(driver)


@pytest.mark.parametrize("limit", [None, 64])
def test_a_prompt_without_another_gets_on_however_little_streams_leave(limit: int | None) -> None:
    driver = make_driver(256, 4, max_num_seqs=64, max_num_batched_tokens=20, prefill_chunk_size=16)
    driver.add(make_request(tokens(3, 9000), 30, request_id="streams", n=18))
    driver.step()
    driver.step()
    driver.scheduler.max_prompt_tokens = limit
    driver.add(make_request(tokens(9), 2, request_id="prompt"))
    for expected in (2, 2, 2, 2, 0):
        assert prompt_tokens(driver) == {"streams": 0, "prompt": expected}
    run_and_check(driver)


def test_a_whole_prompt_may_have_what_others_leave() -> None:
    driver = make_driver(256, 4, max_num_batched_tokens=19, prefill_chunk_size=16)
    for index, (name, length) in enumerate({"long": 40, "a": 2, "b": 1, "c": 3}.items()):
        driver.add(make_request(tokens(length, 1000 * index), 2, request_id=name))
    assert prompt_tokens(driver) == {"long": 16, "a": 2, "b": 0}
    # The two answers go on, and one token is left.
    assert prompt_tokens(driver) == {"long": 16, "a": 0, "b": 0}
    assert prompt_tokens(driver) == {"long": 8, "c": 3}
    run_and_check(driver)


def test_a_prompt_that_waits_for_the_next_step_is_not_passed() -> None:
    driver = make_driver(256, 4, max_num_batched_tokens=19, prefill_chunk_size=16)
    for index, (name, length) in enumerate({"first": 20, "long": 40, "short": 2}.items()):
        driver.add(make_request(tokens(length, 1000 * index), 2, request_id=name))
    assert prompt_tokens(driver) == {"first": 16}
    assert prompt_tokens(driver) == {"first": 4, "long": 15}
    assert prompt_tokens(driver) == {"first": 0, "long": 16, "short": 2}
    run_and_check(driver)


def test_one_that_waits_for_the_blocks_of_another_takes_nothing_of_what_is_left() -> None:
    driver = make_driver(256, 4, max_num_batched_tokens=19, prefill_chunk_size=16)
    system = tokens(40, 2000)
    driver.add(make_request((*system, 1), 2, request_id="first"))
    driver.add(make_request((*system, 2), 2, request_id="alike"))
    driver.add(make_request(tokens(3), 2, request_id="short"))
    assert prompt_tokens(driver) == {"first": 16, "short": 3}
    run_and_check(driver)
    assert driver.sequences[1].num_cached_tokens == 40


def test_a_running_prompt_waits_likewise_where_streams_leave_it_little() -> None:
    driver = make_driver(256, 4, max_num_seqs=64, max_num_batched_tokens=36, prefill_chunk_size=16)
    driver.add(make_request(tokens(3, 9000), 30, request_id="streams", n=17))
    driver.step()
    driver.step()
    for index, name in enumerate(("first", "second")):
        driver.add(make_request(tokens(40, 1000 * index), 2, request_id=name))
    driver.scheduler.max_prompt_tokens = 12
    assert prompt_tokens(driver) == {"streams": 0, "first": 12}
    assert prompt_tokens(driver) == {"streams": 0, "first": 6, "second": 6}
    driver.scheduler.max_prompt_tokens = None
    # There are three more.
    assert prompt_tokens(driver) == {"streams": 0, "first": 16}
    assert prompt_tokens(driver) == {"streams": 0, "first": 6, "second": 13}
    run_and_check(driver)


def with_small_chunks(*lengths: int) -> Driver:
    """Prompts a, b, .. of which each has got a chunk of 4 beside a stream."""
    driver = make_driver(256, 4, max_num_batched_tokens=64, prefill_chunk_size=4)
    driver.add(make_request(tokens(3, 9000), 60, request_id="stream"))
    driver.step()
    driver.scheduler.max_prompt_tokens = 32
    names = "abcdefgh"[: len(lengths)]
    for index, (name, length) in enumerate(zip(names, lengths, strict=True)):
        driver.add(make_request(tokens(length, 1000 * index), 2, request_id=name))
    assert prompt_tokens(driver) == {"stream": 0, **dict.fromkeys(names, 4)}
    return driver


def test_prompts_that_a_step_can_not_end_come_after_newcomers_though_chunks_are_small() -> None:
    driver = with_small_chunks(12, 12, 12, 12)
    for name in "xyz":
        driver.add(make_request(tokens(4, 8000 + ord(name) * 50), 2, request_id=name))
    driver.scheduler.max_prompt_tokens = 20
    expected = {"stream": 0, "x": 4, "y": 4, "z": 4, "b": 4, "a": 4}
    assert prompt_tokens(driver) == expected
    run_and_check(driver)


@pytest.mark.parametrize(("length", "kept"), [(40, 4), (7, 3)])
def test_no_more_is_kept_for_the_first_prompt_than_it_can_have(length: int, kept: int) -> None:
    driver = with_small_chunks(length, 40, 40, 40)
    driver.scheduler.max_prompt_tokens = 12 + kept
    assert prompt_tokens(driver) == {"stream": 0, "a": kept, "b": 4, "c": 4, "d": 4}
    run_and_check(driver)


def with_a_stream(max_prompt_logits: int = 128) -> Driver:
    """Beside it twelve tokens are for prompts; six prompts of 13 tokens are cached."""
    driver = make_driver(
        1000,
        4,
        max_num_batched_tokens=16,
        prefill_chunk_size=16,
        max_num_seqs=64,
        max_prompt_logits=max_prompt_logits,
    )
    for index in range(6):
        driver.add(make_request(tokens(13, 5000 + 100 * index), 1, request_id=f"warm {index}"))
    driver.run()
    driver.add(make_request(tokens(1, 4000), 900, request_id="stream"))
    driver.step()
    driver.scheduler.max_prompt_tokens = 12
    return driver


def test_the_first_prompt_keeps_its_half_however_many_cached_ones_come() -> None:
    """Those have one token each to compute, which is no prompt's."""
    driver = with_a_stream()
    (long,) = driver.add(make_request(tokens(200), 2, request_id="long"))
    driver.step()
    number = 0
    while not long.num_output_tokens:
        number += 1
        new = tokens(6, 8000 + 50 * number)
        driver.add(make_request(new, 1, request_id=f"new {number}"))
        for index in range(8):
            cached = tokens(13, 5000 + 100 * (index % 6))
            driver.add(make_request(cached, 1, request_id=f"cached {number} {index}"))
        num_computed = long.num_computed_tokens
        driver.step()
        assert long.num_computed_tokens >= min(200, num_computed + 6)
    run_and_check(driver, max_steps=2000)


def test_the_first_prompt_keeps_half_of_the_rows_that_tell_of_prompts() -> None:
    driver = with_a_stream(max_prompt_logits=4)
    (long,) = driver.add(make_request(tokens(60), 2, request_id="long", prompt_logprobs=0))
    driver.step()
    number = 0
    while not long.num_output_tokens:
        number += 1
        new = make_request(tokens(5, 8000 + 50 * number), 1, request_id=str(number))
        also = make_request(
            tokens(5, 9000 + 50 * number), 1, request_id=f"also {number}", prompt_logprobs=0
        )
        driver.add(new)
        driver.add(also)
        num_computed = long.num_computed_tokens
        driver.step()
        assert long.num_computed_tokens >= min(60, num_computed + 2)
    run_and_check(driver)


def test_what_streams_leave_of_a_step_is_shared_if_it_is_less_than_the_limit() -> None:
    driver = make_driver(256, 4, max_num_seqs=16, max_num_batched_tokens=16)
    driver.add(make_request(tokens(3, 9000), 30, request_id="streams", n=8))
    driver.step()
    driver.step()
    driver.scheduler.max_prompt_tokens = 12
    driver.add(make_request(tokens(40), 2, request_id="first"))
    assert prompt_tokens(driver) == {"streams": 0, "first": 8}
    driver.add(make_request(tokens(40, 1000), 2, request_id="second"))
    # Four of eight are no crumb, though a chunk might have 64.
    assert prompt_tokens(driver) == {"streams": 0, "first": 4, "second": 4}
    run_and_check(driver)


@given(
    arrivals=st.lists(
        st.lists(st.tuples(st.integers(1, 60), st.integers(1, 5)), max_size=4),
        min_size=1,
        max_size=12,
    ),
    budget=st.integers(1, 70),
    chunk=st.integers(1, 70),
    limits=st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=4),
    depth=st.integers(0, 1),
)
def test_pieces_are_no_crumbs_the_first_gets_on_and_nobody_is_passed_before_the_start(
    arrivals: list[list[tuple[int, int]]],
    budget: int,
    chunk: int,
    limits: list[int | None],
    depth: int,
) -> None:
    driver = make_driver(
        2000,
        4,
        max_num_seqs=40,
        max_num_batched_tokens=budget,
        prefill_chunk_size=chunk,
        max_prompt_logits=1000,
        depth=depth,
    )
    number = 0

    def step() -> bool:
        driver.scheduler.max_prompt_tokens = limit = limits[len(driver.steps) % len(limits)]
        running = driver.scheduler.running
        num_streams = sum(each.num_left <= 1 for each in running)
        num_steps = len(driver.steps)
        with first_prompt_gets_on(driver):
            is_busy = driver.step() is not None
        for done in driver.steps[num_steps:]:
            most = min(budget, chunk)
            if num_streams and limit is not None:
                most = min(most, limit, budget - num_streams)
            pieces = [e for e in done.scheduled if e.num_prompt_tokens]
            crumbs = [e for e in pieces if not e.needs_logits and e.num_tokens < most // 4]
            assert not crumbs or len(pieces) == 1
        return is_busy

    for arriving in arrivals:
        for length, max_tokens in arriving:
            # No two begin alike.
            prompt = tokens(length, 1000 * number)
            driver.add(make_request(prompt, max_tokens, request_id=str(number)))
            number += 1
        step()
    for _ in range(3000):
        if not step():
            break
    driver.check_outputs()
    driver.check_empty()
    starts = [
        entry.sequence.seq_id
        for done in driver.steps
        for entry in sorted(done.scheduled, key=lambda entry: entry.sequence.seq_id)
        if entry.start == 0
    ]
    assert starts == sorted(starts)
