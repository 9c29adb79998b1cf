"""What sequences share is found from their tables, and each row gets its own part of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedmlx.core.batch import NO_BLOCK, Int32Array
from pagedmlx.ops.cascade import CascadePath, CascadePlanner, find_runs, plan_cascade
from pagedmlx.ops.prefill import PrefillVariant
from pagedmlx.ops.runs import Run
from pagedmlx.ops.variants import PoolShape
from pagedmlx.ops.worklist import HEADER, ITEM, make_work_list

BLOCK = 4
WAVE = 64

# Each sequence begins like one of a few prompts, goes its own way after some blocks, and ends
# anywhere in its last block.
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 3), st.integers(1, BLOCK)),
    min_size=1,
    max_size=8,
)


def tables_of(sequences: list[tuple[int, int, int, int]]) -> tuple[Int32Array, Int32Array]:
    """Block tables and context lengths; blocks of prompts first, then those of each sequence."""
    rows = []
    for number, (prompt, num_shared, num_own, _) in enumerate(sequences):
        own = [1000 + 100 * number + i for i in range(num_own + 1)]
        rows.append([*range(100 * prompt, 100 * prompt + num_shared), *own])
    tables = np.full((len(rows), max(map(len, rows))), NO_BLOCK, np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    ends = [BLOCK * (len(row) - 1) + s[3] for row, s in zip(rows, sequences, strict=True)]
    return tables, np.array(ends, np.int32)


@settings(max_examples=200)
@given(sequences=SEQUENCES)
def test_a_run_is_in_the_tables_of_its_sequences_and_no_sequence_in_two(
    sequences: list[tuple[int, int, int, int]],
) -> None:
    tables, ends = tables_of(sequences)
    runs = find_runs(tables, ends, BLOCK)
    members = [place for run in runs for place in run.rows.tolist()]
    assert len(members) == len(set(members))
    for run in runs:
        assert len(run.rows) >= 2
        num_blocks = run.num_tokens // BLOCK
        assert num_blocks * BLOCK == run.num_tokens > 0
        assert (run.num_tokens < ends[run.rows]).all()
        shared = tables[run.rows, :num_blocks]
        assert (shared == shared[0]).all()
        assert NO_BLOCK not in shared
    # Whoever is left alone begins like nobody else who is.
    alone = [place for place in range(len(sequences)) if place not in members]
    beginnings = [tables[place, 0] for place in alone if ends[place] > BLOCK]
    assert len(beginnings) == len(set(beginnings))


def test_the_run_that_spares_most_is_taken() -> None:
    # Three share two blocks, two of them seven: twice two is less than once seven.
    tables, ends = tables_of([(0, 2, 3, 1), (0, 7, 0, 1), (0, 7, 2, 3)])
    (run,) = find_runs(tables, ends, BLOCK)
    assert (run.rows.tolist(), run.num_tokens) == ([1, 2], 28)
    tables, ends = tables_of([(0, 4, 3, 1), (0, 7, 0, 1), (0, 7, 2, 3)])
    (run,) = find_runs(tables, ends, BLOCK)
    assert (run.rows.tolist(), run.num_tokens) == ([0, 1, 2], 16)


def test_hundreds_of_pairs_under_one_beginning_are_found_in_one_pass() -> None:
    tables = np.arange(600 * 9, dtype=np.int32).reshape(600, 9)
    tables[:, 0] = 0
    tables[1::2, :8] = tables[::2, :8]
    runs = find_runs(tables, np.full(600, 9 * BLOCK, np.int32), BLOCK)
    found = sorted((run.rows.tolist(), run.num_tokens) for run in runs)
    assert found == [([place, place + 1], 8 * BLOCK) for place in range(0, 600, 2)]


def test_who_is_left_of_a_larger_group_goes_together() -> None:
    # Four share two blocks, and two of them seven more.
    tables, ends = tables_of([(0, 2, 3, 1), (0, 9, 0, 1), (0, 2, 1, 2), (0, 9, 2, 3)])
    runs = find_runs(tables, ends, BLOCK)
    found = sorted((run.rows.tolist(), run.num_tokens) for run in runs)
    assert found == [([0, 2], 2 * BLOCK), ([1, 3], 9 * BLOCK)]


def test_the_block_of_the_newest_token_is_never_shared() -> None:
    tables = np.array([[7, 8], [7, 8]], np.int32)
    (run,) = find_runs(tables, np.array([8, 8], np.int32), BLOCK)
    assert run.num_tokens == BLOCK
    assert find_runs(tables[:, :1], np.array([4, 4], np.int32), BLOCK) == []


@settings(max_examples=100)
@given(sequences=SEQUENCES, factor=st.sampled_from([1, 3, 8, 16]), wave=st.sampled_from([1, 64]))
def test_every_row_finds_all_shared_tokens_among_its_own_items(
    sequences: list[tuple[int, int, int, int]], factor: int, wave: int
) -> None:
    tables, ends = tables_of(sequences)
    runs = find_runs(tables, ends, BLOCK)
    if not runs:
        return
    variant = _variant(factor)
    # Long enough for several chunks.
    runs = [Run(run.rows, run.num_tokens * 25) for run in runs]
    tables = np.repeat(tables, 25, axis=1)
    cascade = plan_cascade(runs, tables, variant, wave)
    assert cascade.runs.variant.split
    plan = np.asarray(cascade.runs.plan)
    num_items = int(plan[0])
    assert num_items <= cascade.runs.num_items
    items = plan[HEADER : HEADER + ITEM * num_items].reshape(-1, ITEM)
    work = make_work_list(np.ones(len(tables), np.int32), cascade.lows, ends * 25, tables, 64, None)
    cascade.mark(work)
    shares = {int(place): run for run in runs for place in run.rows}
    for place, (_, num_own, _, first, num_chunks, within, *_) in enumerate(
        work.merge_rows.tolist()
    ):
        assert num_own >= 1
        run = shares.get(place)
        if run is None:
            assert (num_chunks, cascade.lows[place]) == (0, 0)
            continue
        assert cascade.lows[place] == run.num_tokens
        assert num_chunks <= cascade.runs.max_chunks
        for vector in range(within * factor, (within + 1) * factor):
            mine = first + vector // variant.vectors * num_chunks
            at = 0
            for rows_at, num_rows, end, table, first_vector, start in items[
                mine : mine + num_chunks, :6
            ].tolist():
                assert start == at < end
                at = end
                assert num_rows == len(run.rows)
                assert plan[rows_at + within] == place
                assert 0 <= vector - first_vector < variant.vectors
                blocks = plan[table : table + run.num_tokens // BLOCK]
                assert np.array_equal(blocks, tables[place, : len(blocks)])
            assert at == run.num_tokens


def test_nothing_is_planned_unless_it_is_wanted_and_can_be() -> None:
    tables, ends = tables_of([(0, 4, 0, 1), (0, 4, 0, 2)])
    plans = {
        (path, variant.pool.k_head_dim): CascadePlanner(path, WAVE).try_plan(
            0, (), tables, ends, variant
        )
        for path in CascadePath
        for variant in (_variant(2), _variant(2, head_dim=512))
    }
    assert [key for key, plan in plans.items() if plan] == [(CascadePath.ON, 64)]
    planner = CascadePlanner(CascadePath.ON, WAVE)
    assert planner.try_plan(0, (), tables[:1], ends[:1], _variant(2)) is None


def test_by_itself_it_is_on_from_the_measured_number_of_spared_tokens() -> None:
    tables, ends = tables_of([(0, 4, 0, 1), (0, 4, 0, 2), (0, 4, 1, 2), (1, 2, 0, 1), (1, 2, 0, 1)])
    # Four blocks spared twice, and two once.
    spared = BLOCK * (4 * 2 + 2)

    def is_on(threshold: int) -> bool:
        planner = CascadePlanner(CascadePath.AUTO, WAVE)
        planner.thresholds[_variant(2)] = threshold
        return planner.try_plan(0, (), tables, ends, _variant(2)) is not None

    assert is_on(spared)
    assert not is_on(spared + 1)


def test_what_is_remembered_is_what_would_be_found_again(monkeypatch) -> None:
    sequences = [(0, 5, 0, 1), (0, 5, 1, 2), (1, 3, 0, 1), (1, 3, 2, 4), (2, 0, 3, 1)]
    tables, ends = tables_of(sequences)
    names: list[object] = [object() for _ in sequences]
    planner, variant = CascadePlanner(CascadePath.ON, WAVE), _variant(2)
    searches = 0

    def count(*arguments: object) -> list[Run]:
        nonlocal searches
        searches += 1
        return find_runs(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("pagedmlx.ops.cascade.find_runs", count)

    def same(tables: Int32Array, ends: Int32Array, names: list[object], group: int = 0) -> None:
        found = planner.try_plan(group, tuple(names), tables, ends, variant)
        fresh = CascadePlanner(CascadePath.ON, WAVE).try_plan(0, (), tables, ends, variant)
        assert (found is None) is (fresh is None)
        if found is not None and fresh is not None:
            assert np.array_equal(found.runs.plan, fresh.runs.plan)
            assert np.array_equal(found.runs.merges, fresh.runs.merges)

    same(tables, ends, names)
    assert searches == 2
    # The next steps: everybody grows, one of them by a block.
    wider = np.full((len(tables), tables.shape[1] + 1), NO_BLOCK, np.int32)
    wider[:, :-1] = tables
    wider[3, np.flatnonzero(wider[3] == NO_BLOCK)[0]] = 999
    grown = ends + np.array([1, 1, 1, 1, 1], np.int32)
    same(wider, grown, names)
    assert searches == 3
    # Blocks that have moved, as after a preemption; sequences in another order; one less.
    moved = wider.copy()
    moved[1, 0] = 998
    same(moved, grown, names)
    assert searches == 5
    order = [4, 3, 2, 1, 0]
    same(wider[order], grown[order], [names[place] for place in order])
    same(wider[:3], grown[:3], names[:3])
    # All have lost blocks, and are about to compute them anew.
    same(wider, grown, names)
    same(wider[:, :3], np.minimum(grown, 3 * BLOCK - 1), names)
    # Another group has other tables, and who isn't named is looked at each time.
    same(wider[order], grown[order], names, group=1)
    before = searches
    same(wider, grown, [])
    same(wider, grown, [])
    assert searches == before + 4


def _variant(factor: int, head_dim: int = 64) -> PrefillVariant:
    return PrefillVariant(PoolShape("bfloat16", 2, head_dim, head_dim, BLOCK), "bfloat16", factor)
