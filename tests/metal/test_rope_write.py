"""RoPE and the write of K and V in one launch: strict check, and executed against float64."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.metal.check import check
from tests.metal.launcher import FiberLauncher, RecordingLauncher
from tests.metal.ropes import RopeCase, covering_ropes

# Of the tolerance that the GPU is given.
MAX_DEVIATION = 0.25


@pytest.mark.parametrize("case", covering_ropes(), ids=str)
def test_rotated_rows_are_right_and_land_in_their_slots(case: RopeCase, count: Counter[str]):
    assert case.deviation(FiberLauncher()) < MAX_DEVIATION
    count["variants of rope_write executed"] += 1


def test_every_variant_passes_the_strict_check():
    recorder = RecordingLauncher()
    for case in covering_ropes():
        store, rows = case.make(recorder)
        store.write_rotated(0, rows, case.rope)
    for source, kernel in recorder.sources.items():
        assert not check(source).diagnostics, kernel.name
