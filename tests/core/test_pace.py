"""PrefillPace finds the number of prompt tokens that fit a bound, whatever a step costs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.core.pace import PrefillPace, StepShare

BOUND = 0.25


def note(pace: PrefillPace, num_prompt_tokens: int, seconds: float) -> None:
    """Learn from one whole step."""
    pace.note([StepShare(num_prompt_tokens, 1.0)], seconds)


def run(
    decode_s: float, prefill_s: float, token_s: float, num_steps: int = 60, least: int = 16
) -> list[float]:
    """Seconds of the steps with prompts, each as large as the pace allows."""
    pace = PrefillPace(BOUND, least)
    for _ in range(3):
        note(pace, 0, decode_s)
    times = []
    for _ in range(num_steps):
        count = pace.max_prompt_tokens
        assert count >= least
        times.append(decode_s + prefill_s + count * token_s)
        note(pace, count, times[-1])
    return times


@given(
    decode_s=st.floats(0.001, 0.15),
    prefill_s=st.floats(0.0, 0.05),
    token_s=st.floats(1e-5, 5e-3),
)
def test_steps_come_to_fill_the_bound_and_never_exceed_it_by_much(
    decode_s: float, prefill_s: float, token_s: float
) -> None:
    smallest = decode_s + prefill_s + 16 * token_s
    bound = max(BOUND, 2 * decode_s)
    times = run(decode_s, prefill_s, token_s)
    if smallest >= bound:
        # Prompts get their least all the same.
        assert times[-1] < smallest + 2 * token_s * 16
    else:
        assert max(times) <= 1.05 * bound
        assert times[-1] >= min(0.65 * bound, smallest) or decode_s + prefill_s > 0.55 * bound


def test_nothing_is_known_at_first_so_prompts_begin_small_and_double() -> None:
    pace = PrefillPace(BOUND, 16)
    assert pace.max_prompt_tokens == 16
    for count in (16, 32, 64):
        assert pace.max_prompt_tokens == count
        note(pace, count, 1e-6 * count)


@given(hiccup=st.floats(1.0, 100.0))
def test_one_hiccup_is_forgotten(hiccup: float) -> None:
    pace = PrefillPace(BOUND, 16)
    note(pace, 0, 0.02)
    for _ in range(30):
        note(pace, pace.max_prompt_tokens, 0.02 + 1e-3 * pace.max_prompt_tokens)
    before = pace.max_prompt_tokens
    note(pace, before, hiccup)
    for _ in range(8):
        note(pace, pace.max_prompt_tokens, 0.02 + 1e-3 * pace.max_prompt_tokens)
    assert pace.max_prompt_tokens >= 0.9 * before


def test_attention_over_a_growing_context_makes_chunks_smaller() -> None:
    pace = PrefillPace(BOUND, 16)
    note(pace, 0, 0.02)
    counts = []
    for step in range(200):
        counts.append(pace.max_prompt_tokens)
        seconds = 0.02 + (2e-4 + 1e-5 * step) * counts[-1]
        if step > 20:
            assert seconds <= 1.05 * BOUND
        note(pace, counts[-1], seconds)
    assert counts[-1] < counts[30] / 2


@given(
    sizes=st.lists(st.integers(128, 512), min_size=30, max_size=30),
    begun=st.floats(0.1, 0.9),
)
def test_parts_of_steps_teach_as_much_as_whole_ones(sizes: list[int], begun: float) -> None:
    pace = PrefillPace(BOUND, 16)
    pace.note([StepShare(0, begun / 2), StepShare(0, begun / 2)], 0.02 * begun)
    for before, after in pairwise(sizes):
        shares = [StepShare(before, 1 - begun), StepShare(after, begun)]
        pace.note(shares, sum(each.share * (0.02 + 1e-3 * each[0]) for each in shares))
    assert pace.max_prompt_tokens in (167, 168)  # (0.75 * 0.25 - 0.02) / 1e-3


def test_prompts_that_begin_meanwhile_are_no_part_of_what_decoding_costs() -> None:
    pace = PrefillPace(BOUND, 16)
    note(pace, 0, 0.02)
    for _ in range(20):
        pace.note([StepShare(0, 1.0), StepShare(100, 0.5)], 0.02 + 0.5 * (0.02 + 0.1))
    assert pace.max_prompt_tokens in (167, 168)


def test_a_step_that_takes_no_time_makes_the_next_a_third_longer() -> None:
    pace = PrefillPace(BOUND, 16)
    note(pace, 0, 0.02)
    for _ in range(20):
        note(pace, 100, 0.02 + 0.1)
    before = pace.max_prompt_tokens
    note(pace, 200, 0.001)
    assert pace.max_prompt_tokens == int(0.1675 / 0.00075)
    assert 1.3 < pace.max_prompt_tokens / before < 1.4


def test_prompts_that_seemed_to_cost_nothing_are_measured_anew() -> None:
    """Decode steps that are compiled at first are slower than the first with a prompt."""
    pace = PrefillPace(BOUND, 16)
    note(pace, 0, 1.0)
    note(pace, 16, 0.03)
    for _ in range(40):
        note(pace, 0, 0.02)
    for _ in range(20):
        note(pace, pace.max_prompt_tokens, 0.02 + 1e-3 * pace.max_prompt_tokens)
    assert 150 <= pace.max_prompt_tokens <= 170


@pytest.mark.parametrize("token_s", [1.0, 1e-3])
def test_prompts_always_get_a_token(token_s: float) -> None:
    pace = PrefillPace(BOUND, 1)
    note(pace, 0, 0.02)
    for _ in range(30):
        assert pace.max_prompt_tokens >= 1
        note(pace, pace.max_prompt_tokens, 0.02 + token_s * pace.max_prompt_tokens)


def test_steps_whose_shortest_time_is_the_hosts_do_not_make_long_ones_seem_cheap() -> None:
    """Up to some length only the host's time shows, and then only the device's."""
    pace = PrefillPace(BOUND, 16)
    note(pace, 0, 0.02)
    for _ in range(60):
        # The scheduler ends chunks at round positions.
        count = 1 << (pace.max_prompt_tokens.bit_length() - 1)
        seconds = max(0.09, 0.02 + 1.4e-4 * count)
        assert seconds <= BOUND
        note(pace, count, seconds)
    assert count == 1024


@pytest.mark.parametrize("times", [5, 10])
@pytest.mark.parametrize("multiple", [1, 16, 1024])
def test_where_tokens_become_dear_there_are_fewer_soon(multiple: int, times: int) -> None:
    pace = PrefillPace(BOUND, 16)
    note(pace, 0, 0.02)
    took = []
    for number in range(300):
        count = min(pace.max_prompt_tokens, 2048)
        count = count // multiple * multiple or count
        took.append(0.02 + (8e-5 if number < 60 else times * 8e-5) * count)
        note(pace, count, took[-1])
    assert max(took[100:]) <= 1.05 * BOUND
