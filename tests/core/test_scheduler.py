from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.core.groups import KVGroup, Windows
from pagedmlx.core.scheduler import LONE_CHUNK
from pagedmlx.core.sequence import FinishReason, Sequence, SequenceStatus
from pagedmlx.core.step import Step, StepResult
from pagedmlx.errors import InvalidRequestError, PoolTooSmallError, QueueFullError
from tests.support.core import (
    FULL,
    WINDOW,
    Driver,
    NoGrammar,
    make_driver,
    make_request,
    next_token,
    solo_output,
)

SYSTEM = tuple(range(100, 116))


def tokens(count: int, first: int = 10) -> tuple[int, ...]:
    """A prompt that shares nothing with one of another ``first``."""
    return tuple(range(first, first + count))


def run_and_check(driver: Driver, max_steps: int = 1000) -> None:
    driver.run(max_steps)
    driver.check_outputs()
    driver.check_empty()


def scheduled_ids(step: Step | None) -> list[int]:
    assert step is not None
    return [entry.sequence.seq_id for entry in step.scheduled]


# Prefix cache, block edges, forks (cases A).


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_a_prompt_sent_twice_gives_the_same_text_and_computes_at_least_one_token(
    length: int,
) -> None:
    driver = make_driver(16, 16)
    for name in "ab":
        (sequence,) = driver.add(make_request(tokens(length), 6, request_id=name))
        driver.run()
    assert sequence.num_cached_tokens == length - 1
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
    driver.step(between=lambda step: driver.scheduler.abort("gone") and None)
    assert stays.seq_id in scheduled_ids(driver.step())
    run_and_check(driver)


# Admission, waiting, overtaking, preemption (cases B).


def test_what_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    driver = make_driver(4, 16)
    with pytest.raises(PoolTooSmallError) as caught:
        driver.add(make_request(tokens(100), 4, request_id="big"))
    assert "100 prompt tokens and 4 output tokens need 7 blocks of 16" in str(caught.value)
    assert "the pool has 4" in str(caught.value)
    assert caught.value.hint
    assert caught.value.http_status == 400
    driver.add(make_request(tokens(5), 4, request_id="small"))
    run_and_check(driver)
    assert driver.scheduler.stats().num_requests == 1


def test_an_empty_prompt_and_an_id_in_use_are_refused() -> None:
    driver = make_driver()
    with pytest.raises(InvalidRequestError, match="prompt: is empty"):
        driver.add(make_request(()))
    driver.add(make_request(tokens(3), request_id="x"))
    with pytest.raises(InvalidRequestError, match="request_id: 'x' is in use"):
        driver.add(make_request(tokens(5), request_id="x"))
    run_and_check(driver)
    driver.add(make_request(tokens(3), request_id="x"))
    run_and_check(driver)


def test_admission_counts_whole_blocks() -> None:
    driver = make_driver(1, 4)
    first, second = (
        driver.add(make_request(tokens(2, f), 2, request_id=str(f)))[0] for f in (1, 9)
    )
    driver.step()
    assert (first.status, second.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    run_and_check(driver)
    assert second.num_preemptions == 0


def test_a_pool_that_holds_one_sequence_still_runs_them_one_after_another() -> None:
    driver = make_driver(3, 4, max_overtakes=2)
    sequences = [
        driver.add(make_request(tokens(9, 50 * f), 4, request_id=str(f)))[0] for f in range(4)
    ]
    run_and_check(driver)
    assert [s.num_preemptions for s in sequences] == [0] * 4


def test_one_that_wants_the_whole_pool_starts_although_others_keep_coming() -> None:
    driver = make_driver(8, 4, max_overtakes=5, prefix_caching=False)
    driver.add(make_request(tokens(3), 6, request_id="first"))
    driver.step()
    (big,) = driver.add(make_request(tokens(26, 50), 7, request_id="big"))
    for number in range(80):
        driver.add(make_request(tokens(3, 100 + 10 * number), 6, request_id=str(number)))
        driver.step()
        if big.status is SequenceStatus.RUNNING:
            break
    assert big.status is SequenceStatus.RUNNING
    assert big.num_overtaken == 5
    run_and_check(driver)


def test_a_newcomer_leaves_each_that_runs_a_block_to_grow_into() -> None:
    driver = make_driver(4, 4, prefix_caching=False)
    first, second, third = (
        driver.add(make_request(tokens(4, 50 * f), 5, request_id=str(f)))[0] for f in range(3)
    )
    driver.step()
    # Two blocks are left, and the two that run will need them.
    assert first.status is second.status is SequenceStatus.RUNNING
    assert third.status is SequenceStatus.WAITING
    run_and_check(driver)
    assert driver.scheduler.stats().num_preemptions == 0


def test_a_newcomer_may_have_the_block_that_nobody_can_come_to_need() -> None:
    driver = make_driver(4, 4, prefix_caching=False)
    driver.add(make_request(tokens(9), 4, request_id="running"))
    driver.step()
    (small,) = driver.add(make_request(tokens(2, 90), 2, request_id="small"))
    driver.step()
    assert small.status is SequenceStatus.RUNNING
    run_and_check(driver)
    assert driver.scheduler.stats().num_preemptions == 0


def test_a_newcomer_leaves_room_for_what_running_prompts_still_need() -> None:
    driver = make_driver(8, 4, prefix_caching=False, prefill_chunk_size=4)
    driver.add(make_request(tokens(20), 2, request_id="chunked"))
    driver.step()
    (other,) = driver.add(make_request(tokens(12, 90), 2, request_id="other"))
    driver.step()
    assert other.status is SequenceStatus.WAITING
    run_and_check(driver)
    assert driver.scheduler.stats().num_preemptions == 0


def test_a_small_request_may_pass_a_big_one_but_only_so_often() -> None:
    driver = make_driver(10, 4, max_overtakes=3, prefix_caching=False)
    driver.add(make_request(tokens(20), 12, request_id="running"))
    driver.step()
    (big,) = driver.add(make_request(tokens(24, 200), 4, request_id="big"))
    started_after = 0
    for number in range(40):
        name = f"small {number}"
        (small,) = driver.add(make_request(tokens(2, 1000 + number), 2, request_id=name))
        driver.step()
        if big.status is SequenceStatus.RUNNING:
            break
        started_after += small.status is not SequenceStatus.WAITING
    assert big.status is SequenceStatus.RUNNING
    assert big.num_overtaken == started_after == 3
    assert driver.scheduler.stats().num_overtakes == 3
    run_and_check(driver)


def test_overtaking_can_be_switched_off() -> None:
    driver = make_driver(10, 4, max_overtakes=0, prefix_caching=False)
    driver.add(make_request(tokens(20), 6, request_id="running"))
    driver.step()
    (big,) = driver.add(make_request(tokens(24, 200), 2, request_id="big"))
    (small,) = driver.add(make_request(tokens(2, 900), 2, request_id="small"))
    while big.status is SequenceStatus.WAITING:
        assert small.status is SequenceStatus.WAITING
        driver.step()
    run_and_check(driver)


def test_nothing_is_cut_short_when_the_pool_runs_dry_mid_answer() -> None:
    driver = make_driver(10, 16)
    sequences = [
        driver.add(make_request(tokens(32, 100 * f), 64, request_id=str(f)))[0] for f in range(4)
    ]
    run_and_check(driver)
    assert [s.num_output_tokens for s in sequences] == [64] * 4
    assert {s.finish_reason for s in sequences} == {FinishReason.LENGTH}
    assert driver.scheduler.stats().num_preemptions > 0


def test_a_preempted_sequence_keeps_its_output_as_output() -> None:
    driver = make_driver(6, 4)
    kept, victim = (
        driver.add(make_request(tokens(4, 50 * f), 16, request_id=str(f)))[0] for f in (1, 2)
    )
    before: list[int] = []
    while not victim.num_preemptions:
        before = victim.output_token_ids
        assert driver.step() is not None
    assert victim.status is SequenceStatus.PREEMPTED
    assert len(before) > 1
    assert victim.output_token_ids[: len(before)] == before
    assert victim.num_prompt_tokens == 4
    assert kept.num_preemptions == 0
    run_and_check(driver)
    assert victim.output_token_ids == solo_output(victim.request, 0)


def test_the_last_arrived_of_the_lowest_priority_gives_way() -> None:
    driver = make_driver(10, 4, prefix_caching=False)
    sequences = {
        name: driver.add(make_request(tokens(4, f), 12, request_id=name, priority=priority))[0]
        for name, f, priority in (
            ("low", 0, 0),
            ("late", 50, 1),
            ("later", 90, 1),
            ("high", 130, 2),
        )
    }
    while not any(s.num_preemptions for s in sequences.values()):
        assert driver.step() is not None
    assert [n for n, s in sequences.items() if s.num_preemptions] == ["low"]
    run_and_check(driver)


def test_a_larger_priority_is_served_first_then_the_earlier_arrival() -> None:
    driver = make_driver(max_num_seqs=1)
    names = {"a": 0, "b": 2, "c": 0, "d": 2}
    for number, (name, priority) in enumerate(names.items()):
        driver.add(make_request(tokens(3, 20 * number), 1, request_id=name, priority=priority))
    order: list[str] = []
    while (step := driver.step()) is not None:
        order += [entry.sequence.request.request_id for entry in step.scheduled]
    assert order == ["b", "d", "a", "c"]


def test_a_step_never_runs_a_sequence_that_it_preempts() -> None:
    """Twins hold equal content twice: the one that loses its blocks could share the other's."""
    driver = make_driver(5, 2)
    driver.add(make_request((0,), 5, n=2, seed=0))
    run_and_check(driver)
    (preempting,) = (step for step in driver.steps if step.preempted)
    assert not set(preempting.preempted) & set(scheduled_ids(preempting))


def test_a_fork_of_a_fork_made_in_the_same_step_copies_from_the_first_source() -> None:
    """All copies of a step happen at once, so none may read what another writes."""
    driver = make_driver(8, 2, prefix_caching=False)
    low = driver.add(make_request((0, 0), 6, request_id="low", n=3))
    driver.add(make_request((0,) * 8, 4, request_id="high", priority=1))
    run_and_check(driver)
    # The second one ran before the first came back, which forks from it, and the third from that.
    (step,) = (step for step in driver.steps if len(step.copies) == 2)
    assert {s.seq_id for s in low} == set(scheduled_ids(step))
    assert step.copies[0].src == step.copies[1].src


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


def test_a_full_queue_refuses_by_the_number_of_requests() -> None:
    driver = make_driver(max_num_seqs=1, max_num_waiting=2)
    driver.add(make_request(tokens(3), 4, request_id="a", n=4))
    driver.step()
    driver.add(make_request(tokens(3, 50), 4, request_id="b", n=4))
    with pytest.raises(QueueFullError, match="2 requests wait already, at most 2 may") as caught:
        driver.add(make_request(tokens(3, 90), 4, request_id="c"))
    assert caught.value.http_status == 429
    assert not driver.scheduler.abort("c")
    run_and_check(driver)


# Ends and aborts.


def test_abort_ends_all_candidates_and_forgets_them() -> None:
    driver = make_driver(16, 4)
    sequences = driver.add(make_request(tokens(6), 30, n=3))
    driver.step()
    driver.step()
    assert driver.scheduler.abort("r") == sequences
    assert {s.finish_reason for s in sequences} == {FinishReason.ABORT}
    assert driver.scheduler.abort("r") == ()
    assert not driver.scheduler.has_unfinished
    assert driver.step() is None
    driver.check_empty()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_an_abort_in_the_step_in_which_a_request_ends_frees_it_once(max_tokens: int) -> None:
    for abort_at in range(5):
        driver = make_driver(16, 4)
        (sequence,) = driver.add(make_request(tokens(5), max_tokens))
        (other,) = driver.add(make_request(tokens(5), 4, request_id="other"))
        for number in range(8):
            if number == abort_at:
                driver.step(between=lambda step, d=driver: d.scheduler.abort("r") and None)
            else:
                driver.step()
        driver.scheduler.finish(sequence, FinishReason.STOP)
        driver.scheduler.abort("r")
        run_and_check(driver)
        assert other.finish_reason is FinishReason.LENGTH
        assert sequence.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        assert driver.scheduler.stats().num_finished_requests == 2


def test_an_aborted_request_that_waits_leaves_at_once_and_is_never_computed() -> None:
    driver = make_driver(4, 4)
    driver.add(make_request(tokens(9), 6, request_id="long"))
    driver.step()
    (waits,) = driver.add(make_request(tokens(9, 80), 6, request_id="waits"))
    driver.step()
    assert driver.scheduler.abort("waits") == (waits,)
    assert not driver.scheduler.waiting
    run_and_check(driver)
    assert all(waits.seq_id not in scheduled_ids(step) for step in driver.steps)


def test_answers_of_every_length_leave_the_batch_without_touching_the_others() -> None:
    driver = make_driver(64, 4, max_num_seqs=8)
    lengths = (1, 2, 3, 5, 8, 13, 40, 80)
    sequences = [
        driver.add(make_request(tokens(5, 30 * i), length, request_id=str(i)))[0]
        for i, length in enumerate(lengths)
    ]
    run_and_check(driver)
    assert tuple(s.num_output_tokens for s in sequences) == lengths


@pytest.mark.parametrize("mates", [0, 3])
def test_one_token_ends_with_length_and_a_first_stop_token_with_stop(mates: int) -> None:
    driver = make_driver(32, 4)
    prompt = tokens(5)
    for number in range(mates):
        driver.add(make_request(tokens(5, 100 + number), 9, request_id=str(number)))
    (short,) = driver.add(make_request(prompt, 1, request_id="short"))
    stop = next_token(make_request(prompt), 0, prompt)
    (stopped,) = driver.add(make_request(prompt, 9, request_id="stopped", stop_token_ids=(stop,)))
    (both,) = driver.add(make_request(prompt, 1, request_id="both", stop_token_ids=(stop,)))
    run_and_check(driver)
    assert (short.finish_reason, short.num_output_tokens) == (FinishReason.LENGTH, 1)
    assert (stopped.finish_reason, stopped.num_output_tokens) == (FinishReason.STOP, 1)
    assert both.finish_reason is FinishReason.STOP, "a stop token at the limit is a stop"


def test_stop_tokens_count_only_from_min_tokens_on() -> None:
    driver = make_driver(32, 4)
    (sequence,) = driver.add(make_request(tokens(3), 12, min_tokens=5, stop_token_ids=(0, 1, 2, 3)))
    run_and_check(driver)
    assert (sequence.num_output_tokens, sequence.finish_reason) == (5, FinishReason.STOP)


def test_a_late_result_of_an_ended_sequence_changes_nothing() -> None:
    driver = make_driver(16, 4)
    (sequence,) = driver.add(make_request(tokens(5), 5))
    step = driver.scheduler.schedule()
    assert step is not None
    driver.scheduler.abort("r")
    assert driver.scheduler.update(StepResult(step.step_id, {sequence.seq_id: 1})) == ()
    assert sequence.num_output_tokens == 0
    driver.check_empty()
    assert driver.kv.pools[0].num_cached_blocks == 0, "nothing of an unfinished step is published"


def test_integrity_check_sees_a_lost_sequence_and_one_out_of_order() -> None:
    driver = make_driver()
    first: Sequence = driver.add(make_request(tokens(3), request_id="a"))[0]
    driver.add(make_request(tokens(3), request_id="b"))
    driver.scheduler.waiting.reverse()
    with pytest.raises(AssertionError, match="out of order"):
        driver.scheduler.check_integrity()
    driver.scheduler.waiting.reverse()
    driver.scheduler.waiting.remove(first)
    with pytest.raises(AssertionError, match="in no queue"):
        driver.scheduler.check_integrity()


def prompt_tokens(driver: Driver) -> dict[str, int]:
    """Prompt tokens of the next step by request."""
    step = driver.step()
    assert step is not None
    return {e.sequence.request.request_id: e.num_prompt_tokens for e in step.scheduled}


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
