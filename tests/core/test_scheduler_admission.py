"""Who is admitted, who waits, who passes whom, and who gives way."""

from __future__ import annotations

import pytest

from pagedmlx.core.sequence import FinishReason, SequenceStatus
from pagedmlx.errors import InvalidRequestError, PoolTooSmallError, QueueFullError
from tests.support.core import make_driver, make_request, solo_output
from tests.support.schedules import run_and_check, scheduled_ids, tokens


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
