"""The most likely tokens by one launch: strict check, and executed against numpy."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.ops.most_likely import MostLikely
from tests.metal.check import check
from tests.metal.greedy import GreedyCase, every_case, expected_tokens
from tests.metal.launcher import FiberLauncher, RecordingLauncher
from tests.support.attention import to_numpy


@pytest.mark.parametrize("case", every_case(), ids=str)
def test_tokens_are_those_of_numpy(case: GreedyCase, count: Counter[str]):
    assert case.deviation(FiberLauncher()) == 0
    count["cases of most_likely executed"] += 1


@pytest.mark.parametrize("num_logits", [1, 7, 8])
def test_a_single_small_row_is_served(num_logits: int):
    logits = mx.arange(num_logits, dtype=mx.float16)[None]
    assert MostLikely(FiberLauncher())(logits).tolist() == [num_logits - 1]


def test_rows_with_strides_are_served():
    logits = GreedyCase("float32", 129).logits
    for part in (logits[::2], logits[:, 3:], logits.T):
        found = np.array(MostLikely(FiberLauncher())(part))
        np.testing.assert_array_equal(found, expected_tokens(to_numpy(part)))


def test_every_variant_passes_the_strict_check():
    recorder = RecordingLauncher()
    for case in every_case():
        MostLikely(recorder)(case.logits)
    for source, kernel in recorder.sources.items():
        report = check(source)
        assert not report.diagnostics, kernel.name
        assert report.threadgroup_bytes == kernel.threadgroup_bytes, kernel.name
