"""What a trace of launches says about a device."""

from __future__ import annotations

import pytest

from scripts.trace import Busy, summed_up

STEP = [(0.0, 10.0, "matmul"), (11.0, 12.0, "norm"), (12.0, 20.0, "most_likely_1")]
"""Begin, end and name of a step's launches, in microseconds."""


def steps(*starts: float) -> list[tuple[float, float, str]]:
    # What only readies a step does not end the time between steps.
    ready = [(start - 2.0, start - 1.0, "copy") for start in starts[1:]]
    return ready + [(start + a, start + b, name) for start in starts for a, b, name in STEP]


def test_idle_time_within_steps_is_told_from_that_between_them() -> None:
    found = summed_up(steps(0.0, 25.0, 50.0), "most_likely")
    # 70 microseconds with three gaps of 1 within steps, and two of 3 + 1 between them.
    assert found == Busy(pytest.approx(59e-6), pytest.approx(11 / 70), pytest.approx(8 / 70), 11)


def test_launches_side_by_side_are_no_idle_time() -> None:
    found = summed_up([(0.0, 10.0, "a"), (2.0, 4.0, "most_likely"), (10.0, 20.0, "b")], "most")
    assert found == Busy(pytest.approx(20e-6), pytest.approx(0.0), pytest.approx(0.0), 3)


def test_nothing_is_said_of_steps_that_nothing_ends() -> None:
    found = summed_up(steps(0.0, 25.0), "argmax")
    assert found is not None
    assert found.between_share is None
    assert summed_up(steps(0.0, 25.0)) == found
    assert summed_up([]) is None
