from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.ops import gather
from pagedmlx.ops.base import AttentionParams
from tests.support.attention import make_case


@given(lengths=st.lists(st.integers(1, 500), max_size=20), max_padding=st.integers(0, 600))
def test_every_sequence_is_in_one_bucket_and_padding_stays_within_its_limit(
    lengths: list[int], max_padding: int
) -> None:
    array = np.array(lengths, dtype=np.int32)
    buckets = gather.split_by_length(array, max_padding)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        assert (array[bucket].max() - array[bucket]).sum() <= max_padding


def test_sequences_of_similar_length_stay_together_in_their_order() -> None:
    lengths = np.array([5, 7, 6], dtype=np.int32)
    assert [list(bucket) for bucket in gather.split_by_length(lengths, 3)] == [[0, 1, 2]]


@pytest.mark.parametrize("max_padding", [0, 20, 10_000])
def test_the_split_into_launches_changes_no_answer(
    monkeypatch: pytest.MonkeyPatch, max_padding: int
) -> None:
    monkeypatch.setattr(gather, "MAX_PADDING", max_padding)
    case = make_case([(30, 1), (3, 1), (50, 1), (31, 1), (9, 4)], factor=2)
    case.check(gather.GatherBackend(), AttentionParams(scale=0.3))
    case.check(gather.GatherBackend(), AttentionParams(scale=0.3, window=20))
