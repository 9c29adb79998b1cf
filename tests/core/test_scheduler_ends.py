"""Ends of all kinds, aborts among them, leave nothing behind and touch nobody else."""

from __future__ import annotations

import pytest

from pagedmlx.core.sequence import FinishReason, Sequence
from pagedmlx.core.step import StepResult
from tests.support.core import make_driver, make_request, next_token
from tests.support.schedules import run_and_check, scheduled_ids, tokens


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
                driver.step(between=lambda step, d=driver: d.scheduler.abort("r"))
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
