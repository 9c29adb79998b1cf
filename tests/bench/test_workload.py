from __future__ import annotations

import numpy as np
import pytest

from pagedmlx.bench.workload import Workload, arrivals, text_prompt, token_prompt


def test_equal_seeds_make_equal_work_and_others_other_work() -> None:
    def made(seed: int) -> tuple[object, ...]:
        workload = Workload(8, 100, 20, 0.7, seed)
        generator = workload.generator()
        lengths = workload.lengths(generator)
        return lengths, token_prompt(generator, 50, 1000), arrivals(generator, 2.0, 8)

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_lengths_are_equal_without_spread_and_keep_their_mean_with_it() -> None:
    plain = Workload(5, 100, 20)
    assert plain.lengths(plain.generator()) == [(100, 20)] * 5
    wide = Workload(4000, 100, 20, 0.8)
    inputs, outputs = zip(*wide.lengths(wide.generator()), strict=True)
    assert np.mean(inputs) == pytest.approx(100, rel=0.05)
    assert np.mean(outputs) == pytest.approx(20, rel=0.05)
    assert min(outputs) >= 1
    assert max(inputs) <= 800


def test_arrivals_come_at_their_rate_and_the_first_one_at_once() -> None:
    times = arrivals(np.random.default_rng(0), 4.0, 4000)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] / len(times) == pytest.approx(0.25, rel=0.05)
    assert arrivals(np.random.default_rng(0), float("inf"), 3) == [0.0] * 3


def test_prompts_are_within_the_vocabulary_and_of_the_length_asked_for() -> None:
    generator = np.random.default_rng(0)
    ids = token_prompt(generator, 500, 300)
    assert len(ids) == 500
    assert 100 <= min(ids) <= max(ids) < 300
    assert max(token_prompt(generator, 50, 3)) < 3
    assert len(text_prompt(generator, 40).split()) == 40
