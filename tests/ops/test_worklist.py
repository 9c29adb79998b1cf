from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedmlx.ops.worklist import (
    HEADER,
    ITEM,
    MAX_CHUNK,
    MERGE_ROW,
    MIN_CHUNK,
    UNLIMITED,
    bucket,
    choose_chunk,
    fixed_chunks,
    make_work_list,
    widest,
)

SPANS = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 8)), min_size=1, max_size=9
)


@settings(max_examples=60)
@given(
    spans=SPANS,
    chunk=st.sampled_from([64, 128, 1024, 2048]),
    window=st.none() | st.just(37),
    num_padding=st.sampled_from([0, 0, 3]),
)
def test_every_token_is_in_one_item_and_every_row_merges_its_own_items(
    spans: list[tuple[int, int, int]], chunk: int, window: int | None, num_padding: int
) -> None:
    lows = np.array([low for low, _, _ in spans], np.int32)
    ends = lows + np.array([length for _, length, _ in spans], np.int32)
    num_rows = np.array([rows for _, _, rows in spans], np.int32)
    tables = np.arange(len(spans) * 5, dtype=np.int32).reshape(len(spans), 5)
    work = make_work_list(num_rows, lows, ends, tables, chunk, window, num_padding=num_padding)
    num_items, seen_window, merge_at, total_rows = work.plan[:4].tolist()
    assert num_items <= work.num_items
    assert seen_window == (UNLIMITED if window is None else window)
    assert total_rows == work.num_rows == num_rows.sum() + num_padding

    items = work.plan[HEADER : HEADER + ITEM * num_items].reshape(num_items, ITEM)
    real = num_items - num_padding
    for place, (row, rows, start, end, context_len, _, partial, _) in enumerate(
        items.tolist()[real:], start=real
    ):
        # Without tokens nothing is read, and nothing written but the output.
        assert (row, rows, partial) == (num_rows.sum() + place - real, 1, place)
        assert (start, end, context_len) == (0, 0, 0)
    items = items[:real]
    first_rows = np.cumsum(num_rows) - num_rows
    covered = {int(row): [] for row in first_rows}
    for place, (row, rows, start, end, context_len, table, partial, _) in enumerate(items.tolist()):
        sequence = int(np.flatnonzero(first_rows == row)[0])
        assert (rows, context_len, partial) == (num_rows[sequence], ends[sequence], place)
        assert start < end <= start // chunk * chunk + chunk
        assert np.array_equal(work.plan[table : table + 5], tables[sequence])
        covered[row].append((start, end, place))
    merges = work.plan[merge_at : merge_at + MERGE_ROW * total_rows].reshape(-1, MERGE_ROW)
    for place, merge in enumerate(merges.tolist()[num_rows.sum() :], start=real):
        assert merge == [place, 1, *[0] * 6]
    for sequence, row in enumerate(first_rows.tolist()):
        parts = covered[row]
        edges = [lows[sequence], *(end for _, end, _ in parts)]
        assert [start for start, _, _ in parts] == edges[:-1]
        assert edges[-1] == ends[sequence]
        assert len(parts) <= work.max_chunks
        for index in range(num_rows[sequence]):
            assert merges[row + index].tolist() == [parts[0][2], len(parts), index, *[0] * 5]


def test_blocks_that_are_not_there_become_valid_ids() -> None:
    tables = np.array([[3, -1, -1]], np.int32)
    plan = make_work_list(*_one_row([16]), tables, 64, None).plan
    assert plan.min() >= 0


def test_chunks_are_the_shortest_that_run_at_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        ends = rng.integers(1025, 40_000, rng.integers(1, 40)).astype(np.int32)
        ends[0] = 80_000  # so that none is left whole
        lows = np.zeros_like(ends)
        chunk = choose_chunk(lows, ends, 8, 528, widths=(1, 2))
        counts = {size: int((-(-ends // size)).sum()) * 8 for size in (chunk, chunk // 2)}
        assert counts[chunk] <= 528 or chunk == MAX_CHUNK
        assert counts[chunk // 2] > 528 or chunk == MIN_CHUNK


def test_enough_short_sequences_are_left_whole_and_a_single_one_is_cut() -> None:
    for length, count, whole in (
        (512, 9, True),
        (512, 8, False),
        (900, 16, True),
        (900, 9, False),
        (1024, 17, True),
        (1025, 18, False),
    ):
        _, lows, ends = _one_row([length] * count)
        assert (choose_chunk(lows, ends, 8, 528) >= length) == whole


def test_sequences_of_any_length_are_left_whole_where_they_keep_the_device_busy() -> None:
    for lengths, may_be_wider, whole in (
        ([50_000] * 66, False, True),
        ([50_000] * 60, False, True),
        ([50_000] * 59, False, False),
        ([50_000] * 67, True, False),  # a second round for one of them
        ([50_000] * 120, True, True),
        ([50_000] * 33, True, True),
        ([50_000] * 33, False, False),
        ([50_000] * 29, True, False),
        ([50_000] * 30 + [40_000] * 3, True, True),
        ([50_000] * 20 + [30_000] * 13, True, False),
        ([50_000] * 16, True, False),
        ([0] * 40 + [1], True, True),  # short, whatever else
    ):
        _, lows, ends = _one_row(lengths)
        chunk = choose_chunk(lows, ends, 8, 528, (1, 2) if may_be_wider else (1,))
        assert (chunk == UNLIMITED) == whole, (len(lengths), may_be_wider)
        plan = make_work_list(
            np.ones_like(ends), lows, ends, np.zeros((len(ends), 3200), np.int32), chunk, None
        )
        assert (plan.max_chunks == 1) == whole


def test_threadgroups_are_as_wide_as_fit_at_once_and_have_work() -> None:
    for num_groups, longest, width in (
        (132, 257, 4),
        (132, 256, 2),
        (133, 5000, 2),
        (264, 5000, 2),
        (264, 1, 2),
        (265, 5000, 1),
        (5000, 5000, 1),
    ):
        assert widest(num_groups, longest, 528, (1, 2, 4)) == width
    _, lows, ends = _one_row([4096] * 16)
    assert choose_chunk(lows, ends, 8, 528, (1, 2, 4)) == UNLIMITED
    assert choose_chunk(lows, ends, 8, 528, (1, 2)) == 1024


def test_fixed_chunks_depend_on_each_sequence_alone() -> None:
    _, lows, ends = _one_row([1, 100, 4096, 17_000, 200_000])
    together = fixed_chunks(lows, ends)
    alone = [fixed_chunks(lows[i : i + 1], ends[i : i + 1])[0] for i in range(len(ends))]
    assert together.tolist() == alone == [128, 128, 256, 1024, 1024]


def test_few_sizes_occur() -> None:
    sizes = {bucket(count) for count in range(1, 10_000)}
    assert len(sizes) < 100
    assert all(count <= bucket(count) <= count * 9 / 8 for count in range(1, 10_000))
    assert all(count <= bucket(count, 4) <= count * 5 / 4 for count in range(1, 10_000))
    assert [bucket(count, 4) for count in (0, 1, 7, 9, 15, 17, 63)] == [0, 1, 7, 10, 16, 20, 64]


def _one_row(lengths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, lows and ends of sequences with one row each."""
    ends = np.array(lengths, np.int32)
    return np.ones_like(ends), np.zeros_like(ends), ends
