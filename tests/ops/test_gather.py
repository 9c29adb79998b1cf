from __future__ import annotations

import numpy as np
import pytest

from pagedmlx.ops.gather import split_by_width


@pytest.mark.parametrize("max_padding", [0, 1, 10, 1000])
def test_every_sequence_is_in_one_bucket_and_padding_stays_within_its_limit(
    max_padding: int,
) -> None:
    widths = np.array([5, 1, 90, 5, 7, 88, 30, 1], dtype=np.int32)
    buckets = split_by_width(widths, max_padding)
    assert sorted(np.concatenate(buckets)) == list(range(len(widths)))
    for bucket in buckets:
        assert (widths[bucket].max() - widths[bucket]).sum() <= max_padding


def test_sequences_of_similar_length_stay_together_in_their_order() -> None:
    widths = np.array([5, 7, 6], dtype=np.int32)
    assert [bucket.tolist() for bucket in split_by_width(widths, 3)] == [[0, 1, 2]]


def test_no_single_row_sequence_makes_no_bucket() -> None:
    assert split_by_width(np.empty(0, dtype=np.int32), 3) == []
