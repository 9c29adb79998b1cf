"""Short chunks behind long contexts: every row finds what it sees, each token once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedmlx.ops.prefill import PrefillVariant
from pagedmlx.ops.runs import Run, plan_runs
from pagedmlx.ops.split_prefill import plan_split_prefill
from pagedmlx.ops.variants import MANY_CHUNKS, PoolShape
from pagedmlx.ops.worklist import HEADER, ITEM, MERGE_ROW
from tests.support.batches import make_batch

BLOCK = 8
SPANS = st.lists(st.tuples(st.integers(0, 900), st.integers(2, 70)), min_size=1, max_size=4)


@settings(max_examples=60)
@given(
    spans=SPANS,
    num_before=st.integers(0, 2),
    factor=st.sampled_from([1, 3, 5, 8]),
    wave=st.sampled_from([1, 64, 1 << 20]),
    columns=st.sampled_from([1, 2]),
    num_padding=st.sampled_from([0, 7]),
)
def test_a_row_finds_each_token_that_it_sees_once(
    spans: list[tuple[int, int]],
    num_before: int,
    factor: int,
    wave: int,
    columns: int,
    num_padding: int,
) -> None:
    before = [(5, 1)] * num_before
    num_blocks = 4 + sum(-(-sum(span) // BLOCK) for span in spans)
    host = make_batch(
        [*before, *spans], block_size=BLOCK, num_blocks=num_blocks, rng=np.random.default_rng(0)
    )
    variant = _variant(factor, columns)
    sequences = np.arange(num_before, num_before + len(spans))
    work = plan_split_prefill(host, sequences, 0, variant, wave, num_padding)
    plan, merge_plan = np.asarray(work.runs.plan), np.asarray(work.plan)
    num_items = int(plan[0])
    assert num_items <= work.runs.num_items
    items = plan[HEADER : HEADER + ITEM * num_items].reshape(-1, ITEM).tolist()
    at, num_rows = merge_plan[2:4].tolist()
    assert num_rows == work.num_rows == sum(count for _, count in spans) + num_padding
    merges = iter(merge_plan[at:].reshape(-1, MERGE_ROW).tolist())
    row = 0
    for (start, count), table in zip(spans, host.groups[0].block_tables[sequences], strict=True):
        for position in range(start, start + count):
            first, num_chunks, place, *_ = next(merges)
            assert num_chunks <= work.runs.max_chunks
            for vector in (place * factor, (place + 1) * factor - 1):
                mine = first + vector // variant.vectors * num_chunks
                seen: list[int] = []
                for rows_at, _, end, table_at, first_vector, low, first_end, _ in items[
                    mine : mine + num_chunks
                ]:
                    assert plan[rows_at + place] == row
                    assert 0 <= vector - first_vector < variant.vectors
                    assert low % variant.keys == 0
                    seen += range(low, min(end, first_end + place))
                    blocks = plan[table_at : table_at + -(-end // BLOCK)]
                    assert np.array_equal(blocks, table[: len(blocks)])
                assert seen == list(range(position + 1))
            row += 1
    assert not np.any(list(merges)), "padding sees nothing"
    assert (work.merge.num_simdgroups > 1) == (work.runs.max_chunks > MANY_CHUNKS)


def test_many_long_contexts_are_cut_in_few_parts_that_wait_in_memory() -> None:
    variant = _variant(4, columns=2)
    for num_chunks, length in ((1, 4096), (8, 32_768), (8, 131_072)):
        rows = np.arange(256)
        runs = [Run(rows + 256 * i, length, length - 255) for i in range(num_chunks)]
        tables = [np.arange(length // BLOCK, dtype=np.int32)] * num_chunks
        work = plan_runs(runs, tables, 256 * num_chunks, variant, most_groups=264)
        assert 2 <= work.max_chunks <= 9
        num_vectors = 256 * num_chunks * variant.factor
        assert work.num_items * variant.vectors <= 9 * num_vectors


def _variant(factor: int, columns: int) -> PrefillVariant:
    pool = PoolShape("bfloat16", 2, 128, 128, BLOCK)
    return PrefillVariant(pool, "bfloat16", factor, columns=columns)
