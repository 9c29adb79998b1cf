"""What a step has room for, and that chunks end at round positions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.core.pooling import Pooling
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.step_plan import StepPlan, aligned
from tests.support.core import make_driver, make_request


def make_sequence(
    length: int, *, prompt_logprobs: int | None = None, pooling: Pooling | None = None
) -> Sequence:
    """One that waits with nothing computed."""
    request = make_request(range(length), 1, prompt_logprobs=prompt_logprobs, pooling=pooling)
    return make_driver(100).add(request)[0]


@pytest.mark.parametrize(
    ("room", "num_left", "is_worth"),
    [(16, 17, True), (4, 17, True), (3, 17, False), (3, 4, False), (3, 3, True), (1, 1, True)],
)
def test_beside_a_prompt_another_has_all_that_it_needs_or_a_quarter_of_a_chunk(
    room: int, num_left: int, is_worth: bool
) -> None:
    plan = StepPlan(20 + room, 16, 128)
    assert plan.is_worth(num_left)
    plan.enter(make_sequence(20), 20, [])
    assert plan.is_worth(num_left) is is_worth
    assert plan.num_tokens_for(make_sequence(num_left)) == (min(room, num_left) if is_worth else 0)


@pytest.mark.parametrize("room", [1, 2, 16])
def test_a_prompt_without_another_gets_whatever_there_is(room: int) -> None:
    plan = StepPlan(room + 3, 16, 128)
    for _ in range(3):
        plan.enter(make_sequence(1), 1, [])
    assert plan.num_tokens_for(make_sequence(100)) == room
    other = make_sequence(room)
    plan.enter(other, room, [])
    assert not plan.is_worth(100)
    assert not plan.is_worth(1), "nothing is left"
    plan.preempt(other)
    assert plan.num_tokens_for(make_sequence(100)) == room


def test_a_small_chunk_has_no_quarter() -> None:
    plan = StepPlan(8, 3, 128)
    for expected in (3, 3, 2, 0):
        assert plan.num_tokens_for(make_sequence(10)) == expected
        if expected:
            plan.enter(make_sequence(10), expected, [])


@pytest.mark.parametrize(
    ("prompt_logprobs", "pooling", "num_logits"),
    [(None, None, 5), (0, None, 2), (None, Pooling.MEAN, 5)],
)
def test_half_is_kept_for_one_that_comes_last(
    prompt_logprobs: int | None, pooling: Pooling | None, num_logits: int
) -> None:
    plan = StepPlan(20, 16, 5)
    plan.num_prompt_tokens_left = 11
    with plan.half_kept_for(make_sequence(100, prompt_logprobs=prompt_logprobs, pooling=pooling)):
        assert (plan.num_tokens_left, plan.num_prompt_tokens_left) == (14, 5)
        assert plan.num_prompt_logits_left == num_logits
        plan.enter(make_sequence(4), 4, [])
        plan.enter(make_sequence(1), 1, [])
    assert (plan.num_tokens_left, plan.num_prompt_tokens_left) == (15, 7)
    assert plan.num_prompt_logits_left == 5


def test_nothing_is_kept_for_nobody() -> None:
    plan = StepPlan(20, 16, 5)
    with plan.half_kept_for(None):
        assert (plan.num_tokens_left, plan.num_prompt_tokens_left) == (20, 20)
        assert plan.num_prompt_logits_left == 5


@given(start=st.integers(0, 5000), num_tokens=st.integers(1, 3000), power=st.integers(0, 11))
def test_a_chunk_ends_at_a_round_position_and_has_a_third_at_least(
    start: int, num_tokens: int, power: int
) -> None:
    multiple = 1 << power
    found = aligned(start, num_tokens, multiple)
    assert num_tokens < 3 * found <= 3 * num_tokens
    end = start + found
    ends = range(start + -(-num_tokens // 2), start + num_tokens + 1)
    roundest = max(min(each & -each, multiple) for each in ends)
    assert end % roundest == 0 or end % min(start & -start, multiple) == 0


@given(start=st.integers(0, 5000), power=st.integers(1, 11), data=st.data())
def test_chunks_that_follow_each_other_soon_have_one_shape(
    start: int, power: int, data: st.DataObject
) -> None:
    multiple = 1 << power
    num_tokens = data.draw(st.integers(1, 2 * multiple))
    length = min(multiple, 1 << (num_tokens.bit_length() - 1))
    for _ in range(12):
        start += aligned(start, num_tokens, multiple)
    for _ in range(4):
        assert start % length == 0
        assert aligned(start, num_tokens, multiple) == length
        start += aligned(start, num_tokens, multiple)
