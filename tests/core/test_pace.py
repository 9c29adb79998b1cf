"""PrefillPace finds the number of prompt tokens that fit a bound, whatever a step costs."""

from __future__ import annotations

from itertools import pairwise
from random import Random

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
        assert count >= least // 2
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
        # Of two, because one may have half of the least.
        longer = max(times[-2:])
        assert longer >= min(0.8 * bound, smallest) or decode_s + prefill_s > 0.7 * bound


def test_nothing_is_known_at_first_so_prompts_begin_small_and_double() -> None:
    pace = PrefillPace(BOUND, 16)
    assert pace.max_prompt_tokens == 16
    for count in (16, 32, 64):
        assert pace.max_prompt_tokens == count
        note(pace, count, 1e-6 * count)


def test_prompts_that_seemed_to_cost_nothing_are_measured_anew() -> None:
    """Decode steps that are compiled at first are slower than the first with a prompt."""
    pace = PrefillPace(BOUND, 16)
    note(pace, 0, 1.0)
    note(pace, 16, 0.03)
    for _ in range(40):
        note(pace, 0, 0.02)
    for _ in range(20):
        note(pace, pace.max_prompt_tokens, 0.02 + 1e-3 * pace.max_prompt_tokens)
    assert 180 <= pace.max_prompt_tokens <= 210


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
    assert pace.max_prompt_tokens in (204, 205)  # (0.9 * 0.25 - 0.02) / 1e-3


def test_prompts_that_begin_meanwhile_are_no_part_of_what_decoding_costs() -> None:
    pace = PrefillPace(BOUND, 16)
    note(pace, 0, 0.02)
    for _ in range(20):
        pace.note([StepShare(0, 1.0), StepShare(100, 0.5)], 0.02 + 0.5 * (0.02 + 0.1))
    assert pace.max_prompt_tokens in (200, 204, 205)


def test_a_step_that_takes_no_time_lets_the_next_be_little_longer() -> None:
    pace = PrefillPace(BOUND, 16)
    note(pace, 0, 0.02)
    for _ in range(20):
        note(pace, 100, 0.02 + 0.1)
    before = pace.max_prompt_tokens
    note(pace, 200, 0.001)
    assert pace.max_prompt_tokens < 1.4 * before
    for _ in range(20):
        note(pace, 100, 0.02 + 0.1)
    assert pace.max_prompt_tokens >= 0.95 * before


@given(fixed=st.floats(1.0, 3.0), least=st.sampled_from((4, 16, 64)), start=st.integers(1, 2048))
def test_where_no_step_with_prompts_fits_the_bound_they_are_not_starved(
    fixed: float, least: int, start: int
) -> None:
    """Few tokens would take as long as many, so few gain streams nothing."""
    decode_s, token_s = 0.1 * BOUND, 1e-4 * BOUND
    pace = PrefillPace(BOUND, least)
    note(pace, 0, decode_s)
    note(pace, start, decode_s + fixed * BOUND + start * token_s)
    counts, times = [], []
    for _ in range(100):
        counts.append(pace.max_prompt_tokens)
        times.append(decode_s + fixed * BOUND + counts[-1] * token_s)
        note(pace, counts[-1], times[-1])
    assert min(counts[50:]) >= 2000
    # And streams don't wait much longer for it than for a prompt of one token.
    assert max(times[1:]) <= 1.6 * (decode_s + fixed * BOUND)


@given(least=st.sampled_from((4, 16, 64)), token_s=st.floats(1.0, 10.0))
def test_where_each_token_is_slow_steps_have_the_least_or_half_of_it(
    least: int, token_s: float
) -> None:
    pace = PrefillPace(BOUND, least)
    note(pace, 0, 0.1 * BOUND)
    for _ in range(50):
        count = pace.max_prompt_tokens
        assert count in (least, least // 2)
        note(pace, count, 0.1 * BOUND + count * token_s * BOUND)


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


@given(seed=st.integers(0, 1000))
def test_a_host_that_takes_about_the_target_for_any_prompt_lets_them_grow(seed: int) -> None:
    generator = Random(seed)
    pace = PrefillPace(BOUND, 16)
    note(pace, 0, 0.08)
    counts = []
    for _ in range(300):
        counts.append(1 << (pace.max_prompt_tokens.bit_length() - 1))
        note(pace, counts[-1], generator.uniform(0.2, 0.25) + 1e-5 * counts[-1])
    assert sum(counts[100:]) / 200 >= 256


def test_what_prompts_cost_at_all_is_no_part_of_steps_without_any() -> None:
    pace, whole = PrefillPace(BOUND, 16), PrefillPace(BOUND, 16)
    for each in (pace, whole):
        note(each, 0, 0.02)
    for count in [16, 64, 256, 512] * 5:
        seconds = 0.02 + 0.3 + 1e-4 * count
        note(whole, count, seconds)
        pace.note([StepShare(0, 1.0), StepShare(count, 0.5)], 0.02 + 0.5 * seconds)
    assert abs(pace.max_prompt_tokens - whole.max_prompt_tokens) <= 1
