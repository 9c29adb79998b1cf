"""Prefix cache, block edges and forks, as the scheduler uses them."""

from __future__ import annotations

import pytest

from pagedmlx.core.sequence import FinishReason, SequenceStatus
from pagedmlx.errors import PoolTooSmallError
from tests.support.core import make_driver, make_request
from tests.support.schedules import SYSTEM, run_and_check, scheduled_ids, tokens


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_a_prompt_sent_twice_gives_the_same_text_and_computes_at_least_one_token(
    length: int,
) -> None:
    driver = make_driver(16, 16)
    for name in "ab":
        driver.add(make_request(tokens(length), 6, request_id=name))
        driver.run()
    assert driver.sequences[-1].num_cached_tokens == length - 1
    run_and_check(driver)


def test_a_longer_prompt_still_hits_after_full_hits() -> None:
    driver = make_driver(16, 16)
    for name in "abc":
        driver.add(make_request(tokens(64), 1, request_id=name))
        driver.run()
    (longer,) = driver.add(make_request(tokens(84), 4, request_id="d"))
    run_and_check(driver)
    assert longer.num_cached_tokens == 64


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_to_be_told_of_is_computed_whole_and_in_short_chunks(depth: int) -> None:
    driver = make_driver(32, 4, max_prompt_logits=6, depth=depth)
    driver.add(make_request(SYSTEM, 4, request_id="first"))
    driver.run()
    (told,) = driver.add(make_request(SYSTEM, 4, request_id="told", prompt_logprobs=0))
    (also,) = driver.add(make_request(SYSTEM, 4, request_id="also", prompt_logprobs=0))
    (plain,) = driver.add(make_request(SYSTEM, 4, request_id="plain"))
    run_and_check(driver)
    assert (told.num_cached_tokens, also.num_cached_tokens, plain.num_cached_tokens) == (0, 0, 12)
    assert driver.told == {told.seq_id: range(15), also.seq_id: range(15)}


def test_only_the_first_of_several_outputs_tells_of_the_prompt() -> None:
    driver = make_driver(32, 4, max_prompt_logits=6)
    sequences = driver.add(make_request(SYSTEM, 4, n=3, prompt_logprobs=0))
    run_and_check(driver)
    assert driver.told == {sequences[0].seq_id: range(15)}
    assert [each.num_cached_tokens for each in sequences] == [0, 15, 15]


@pytest.mark.parametrize("length", [15, 16, 17])
@pytest.mark.parametrize("max_tokens", [16, 17, 18])
def test_a_pool_of_exactly_the_right_size_is_enough(length: int, max_tokens: int) -> None:
    """The last token is never fed back, so it needs no slot."""
    num_blocks = -(-(length + max_tokens - 1) // 16)
    driver = make_driver(num_blocks, 16)
    (sequence,) = driver.add(make_request(tokens(length), max_tokens))
    run_and_check(driver)
    assert sequence.num_output_tokens == max_tokens
    assert sequence.num_preemptions == 0
    smaller = make_driver(num_blocks - 1, 16) if num_blocks > 1 else None
    if smaller is not None:
        with pytest.raises(PoolTooSmallError):
            smaller.add(make_request(tokens(length), max_tokens))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 20])
def test_each_candidate_equals_the_one_that_runs_alone(length: int) -> None:
    driver = make_driver(32, 16)
    sequences = driver.add(make_request(tokens(length), 20, n=4))
    run_and_check(driver)
    assert len({tuple(s.output_token_ids) for s in sequences}) == 4
    stats = driver.scheduler.stats()
    assert stats.num_computed_tokens == (length + 3 if length > 1 else 4) + 4 * 19
    # Only a partly filled block is copied, once for each further candidate.
    assert stats.num_copies == (3 if (length - 1) % 16 else 0)


def test_candidates_go_on_when_the_first_has_ended() -> None:
    driver = make_driver(32, 4)
    sequences = driver.add(make_request(tokens(6), 12, n=4))
    driver.step()
    driver.step()
    driver.scheduler.finish(sequences[0], FinishReason.STOP)
    for sequence in sequences[1:]:
        assert sequence.status is SequenceStatus.RUNNING
    driver.run()
    assert [s.num_output_tokens for s in sequences[1:]] == [12] * 3
    driver.check_empty()


def test_many_prompts_one_after_another_leak_nothing() -> None:
    driver = make_driver(8, 4)
    for number in range(20):
        driver.add(make_request(tokens(8, 1000 * number), 3, request_id=str(number)))
        run_and_check(driver)
    assert driver.scheduler.stats().num_evictions > 0


def test_resuming_from_a_hit_starts_where_the_hit_ends() -> None:
    driver = make_driver(32, 16)
    driver.add(make_request(tokens(48), 1, request_id="first"))
    driver.run()
    for tail in (1, 5, 16, 17):
        prompt = (*tokens(48), *tokens(tail, 500 * tail))
        (sequence,) = driver.add(make_request(prompt, 3, request_id=str(tail)))
        step = driver.step()
        assert step is not None
        assert step.scheduled[0].start == sequence.num_cached_tokens == 48
        assert step.scheduled[0].num_tokens == tail
        driver.run()
    driver.check_outputs()


def test_a_hit_goes_on_into_a_block_that_only_begins_alike() -> None:
    driver = make_driver(16, 16)
    driver.add(make_request(tokens(40), 1, request_id="first"))
    driver.run()
    (sequence,) = driver.add(make_request((*tokens(25), 1, 2, 3), 20, request_id="second"))
    step = driver.step()
    assert step is not None
    assert (step.scheduled[0].start, len(step.copies)) == (25, 1)
    assert sequence.num_cached_tokens == 25
    run_and_check(driver)
    (again,) = driver.add(make_request(tokens(40), 1, request_id="again"))
    run_and_check(driver)
    assert again.num_cached_tokens == 32, "what was copied is still what it was"


def test_hits_of_different_length_and_cold_prompts_share_a_step() -> None:
    driver = make_driver(32, 4)
    for name, length in (("x", 13), ("y", 5)):
        driver.add(make_request(tokens(length, ord(name)), 1, request_id=name))
        driver.run()
    driver.add(make_request((*tokens(13, ord("x")), 1), 4, request_id="three blocks"))
    driver.add(make_request(tokens(7, 900), 4, request_id="cold"))
    driver.add(make_request((*tokens(5, ord("y")), 1, 2), 4, request_id="one block"))
    step = driver.step()
    assert step is not None
    assert {e.sequence.request.request_id: e.start for e in step.scheduled} == {
        "three blocks": 12,
        "cold": 0,
        "one block": 4,
    }
    run_and_check(driver)


def test_a_burst_with_one_system_prompt_computes_it_once() -> None:
    driver = make_driver(64, 4, max_num_seqs=16, max_num_batched_tokens=256)
    burst = 10
    for number in range(burst):
        driver.add(make_request((*SYSTEM, number), 3, request_id=str(number)))
    first = driver.step()
    assert first is not None
    assert len(first.scheduled) == 1, "the others wait for its blocks"
    assert driver.scheduler.stats().num_deferrals == burst - 1
    second = driver.step()
    assert second is not None
    assert len(second.scheduled) == burst, "and all hit in the next step"
    run_and_check(driver)
    stats = driver.scheduler.stats()
    assert stats.num_computed_tokens == len(SYSTEM) + burst + burst * 2
    assert stats.num_cached_tokens == len(SYSTEM) * (burst - 1)


def test_a_burst_behind_a_chunked_prompt_still_computes_it_once() -> None:
    driver = make_driver(64, 4, max_num_seqs=16, prefill_chunk_size=5)
    for number in range(4):
        driver.add(make_request((*SYSTEM, number), 2, request_id=str(number)))
    run_and_check(driver)
    assert driver.scheduler.stats().num_computed_tokens == len(SYSTEM) + 4 + 4


def test_nobody_waits_for_a_prompt_that_was_aborted() -> None:
    driver = make_driver(64, 4, prefill_chunk_size=4)
    driver.add(make_request((*SYSTEM, 1), 2, request_id="gone"))
    (stays,) = driver.add(make_request((*SYSTEM, 2), 2, request_id="stays"))
    driver.step(between=lambda step: driver.scheduler.abort("gone"))
    assert stays.seq_id in scheduled_ids(driver.step())
    run_and_check(driver)
