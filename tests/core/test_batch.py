from __future__ import annotations

import numpy as np

from pagedmlx.core.batch import NO_BLOCK, build_batch
from pagedmlx.core.pooling import Pooling
from pagedmlx.core.step import Step
from tests.support.core import FULL, WINDOW, make_driver, make_request


def test_rows_slots_and_tables_of_a_mixed_step() -> None:
    driver = make_driver(16, 4, max_num_batched_tokens=64, prefill_chunk_size=6)
    (short,) = driver.add(make_request((1, 2, 3), 4, request_id="short"))
    driver.step()
    (long,) = driver.add(make_request(range(20, 30), 4, request_id="long"))
    step = driver.scheduler.schedule()
    assert step is not None
    batch = build_batch(step, 4)
    assert batch.sequences == (short, long)
    assert batch.num_decodes == 1
    assert batch.num_rows == 7
    assert batch.token_ids.tolist() == [short.token_ids[3], 20, 21, 22, 23, 24, 25]
    assert batch.positions.tolist() == [3, 0, 1, 2, 3, 4, 5]
    assert batch.query_start_loc.tolist() == [0, 1, 7]
    assert batch.context_lens.tolist() == [4, 6]
    assert batch.sample_rows.tolist() == [0], "a chunk that isn't the last samples nothing"
    assert batch.sample_sequences == (short,)
    (group,) = batch.groups
    assert group.block_tables.tolist() == [[0, NO_BLOCK], [1, 2]]
    assert group.slot_mapping.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert group.copy_src.tolist() == group.copy_dst.tolist() == []


def test_rows_for_log_probabilities_of_a_prompt_stand_beside_those_that_sample() -> None:
    driver = make_driver(16, 4, max_num_batched_tokens=64, prefill_chunk_size=6)
    (short,) = driver.add(make_request((1, 2, 3), 4, request_id="short"))
    driver.step()
    (told,) = driver.add(make_request(range(20, 25), 4, request_id="told", prompt_logprobs=1))
    (long,) = driver.add(make_request(range(30, 40), 4, request_id="long", prompt_logprobs=1))
    step = driver.scheduler.schedule()
    assert step is not None
    batch = build_batch(step, 4)
    assert batch.sequences == (short, told, long)
    assert batch.sample_rows.tolist() == list(range(12))
    assert batch.sample_sequences == (short, *[told] * 5, *[long] * 6)
    assert batch.prompt_places.tolist() == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]


def test_rows_of_embeddings_have_no_logits() -> None:
    driver = make_driver(16, 4, max_num_batched_tokens=64, prefill_chunk_size=6)
    (short,) = driver.add(make_request((1, 2, 3), 4, request_id="short"))
    driver.step()
    for index, (pooling, length) in enumerate(
        [(Pooling.LAST, 5), (Pooling.MEAN, 9), (Pooling.FIRST, 3), (Pooling.LAST, 8)]
    ):
        start = 20 * (index + 1)
        prompt = range(start, start + length)
        driver.add(make_request(prompt, 1, request_id=str(index), pooling=pooling))
    step = driver.scheduler.schedule()
    assert step is not None
    batch = build_batch(step, 4)
    assert batch.query_start_loc.tolist() == [0, 1, 6, 12, 15, 21]
    assert batch.sample_sequences == (short,)
    # The chunk of the last one doesn't reach its last token.
    assert [each.rows for each in batch.pooled] == [range(5, 6), range(6, 12), range(12, 13)]
    assert [each.sequence.request.request_id for each in batch.pooled] == ["0", "1", "2"]


def test_the_tail_of_a_row_is_a_sentinel_even_where_the_table_is_reused() -> None:
    driver = make_driver(16, 4, prefill_chunk_size=4)
    (first,) = driver.add(make_request(range(5), 1, request_id="ends early"))
    driver.add(make_request(range(20, 26), 8, request_id="stays"))
    driver.add(make_request(range(40, 64), 4, request_id="long"))
    while not first.is_finished:
        driver.step()

    def check(step: Step) -> None:
        batch = build_batch(step, 4)
        tables = batch.groups[0].block_tables
        for row, length in zip(tables, batch.context_lens, strict=True):
            used = -(-int(length) // 4)
            assert (row[:used] >= 0).all()
            assert (row[used:] == NO_BLOCK).all()

    while driver.step(between=check) is not None:
        pass
    driver.check_outputs()


def test_each_group_has_its_own_slots_and_copies() -> None:
    driver = make_driver(16, 4, groups=(FULL, WINDOW))
    # The second group's ids differ from the first's from the start.
    hoard = [driver.kv.pools[1].allocate() for _ in range(3)]
    driver.add(make_request(range(6), 4, n=2))
    step = driver.scheduler.schedule()
    assert step is not None
    batch = driver.ghost.execute(step)
    slots = [group.slot_mapping.tolist() for group in batch.groups]
    assert slots == [list(range(6)), list(range(12, 18))]
    for block in hoard:
        driver.kv.pools[1].free([block])


def test_copies_are_listed_for_their_group() -> None:
    driver = make_driver(16, 4, groups=(FULL, WINDOW))
    driver.add(make_request(range(6), 4, n=2))
    driver.step()
    step = driver.step()
    assert step is not None
    assert [(copy.group, copy.src, copy.dst) for copy in step.copies] == [(0, 1, 2), (1, 1, 2)]
    driver.run()
    driver.check_outputs()


def test_arrays_have_the_types_that_kernels_read() -> None:
    driver = make_driver(16, 4)
    driver.add(make_request(range(6), 4, n=2))
    driver.step()
    step = driver.scheduler.schedule()
    assert step is not None
    batch = build_batch(step, 4)
    group = batch.groups[0]
    small = (
        batch.token_ids,
        batch.positions,
        batch.query_start_loc,
        batch.context_lens,
        batch.sample_rows,
        group.block_tables,
        group.copy_src,
        group.copy_dst,
    )
    assert {array.dtype for array in small} == {np.dtype(np.int32)}
    assert group.slot_mapping.dtype == np.int64


def test_a_slot_number_may_pass_32_bits() -> None:
    driver = make_driver(2**31 - 1, 64)
    (sequence,) = driver.add(make_request(range(3), 4))
    step = driver.scheduler.schedule()
    assert step is not None
    sequence.block_tables[0]._ids[0] = 2**31 - 2
    (group,) = build_batch(step, 64).groups
    assert group.slot_mapping.tolist() == [(2**31 - 2) * 64 + offset for offset in range(3)]
