from __future__ import annotations

import pytest

from pagedmlx.bench.measure import Bounds, Served, distribution, hit_rate, summarize


def served(start: float, *times: float, cached: int | None = 0, error: str = "") -> Served:
    return Served(start, list(times), 10, cached, len(times), error)


def test_rates_count_from_the_first_request_to_the_last_token() -> None:
    found = summarize([served(1.0, 1.5, 2.0, 2.5), served(2.0, 4.0, 5.0)])
    assert found["wall_s"] == 4.0
    assert found["requests_per_s"] == 0.5
    assert found["output_tokens_per_s"] == 5 / 4
    assert found["total_tokens_per_s"] == 25 / 4
    assert found["ttft_s"]["p50"] == pytest.approx(1.25)
    assert found["itl_s"]["max"] == pytest.approx(1.0)
    assert "goodput_per_s" not in found


def test_what_failed_is_told_and_counts_for_nothing_else() -> None:
    found = summarize([served(0.0, 1.0, 2.0), served(0.0, error="refused"), served(0.0)])
    assert (found["num_requests"], found["num_failed"]) == (3, 2)
    assert found["errors"] == ["refused"]
    assert found["num_output_tokens"] == 2
    nothing = summarize([served(0.0, error="refused")])
    assert nothing["requests_per_s"] is None
    assert nothing["ttft_s"] is None


def test_goodput_counts_requests_that_keep_both_bounds() -> None:
    bounds = Bounds(ttft_s=1.0, itl_s=0.5)
    well = served(0.0, 1.0, 1.5, 2.0)
    late = served(0.0, 1.1, 1.2)
    halting = served(0.0, 0.5, 1.5, 2.5)
    single = served(0.0, 0.2)
    failed = served(0.0, 0.1, error="gone")
    kept = [bounds.are_kept_by(each) for each in (well, late, halting, single, failed)]
    assert kept == [True, False, False, True, False]
    found = summarize([well, late, halting, single, failed], bounds)
    assert found["num_within_bounds"] == 2
    assert found["goodput_per_s"] == pytest.approx(2 / 2.5)


def test_one_slow_token_in_twenty_is_forgiven() -> None:
    times = [0.1 * number for number in range(1, 40)]
    assert Bounds(1.0, 0.2).are_kept_by(served(0.0, *times, times[-1] + 3.0))
    assert not Bounds(1.0, 0.2).are_kept_by(served(0.0, 1.0, 4.0))


def test_percentiles_of_nothing_are_none() -> None:
    assert distribution([]) is None
    found = distribution([1.0, 2.0, 3.0, 4.0])
    assert found is not None
    assert (found["mean"], found["p50"], found["max"]) == (2.5, 2.5, 4.0)


def test_the_hit_rate_is_of_the_prompts_tokens() -> None:
    assert hit_rate([served(0, 1, cached=8), served(0, 1, cached=None)]) == 0.4
    assert hit_rate([]) == 0.0
