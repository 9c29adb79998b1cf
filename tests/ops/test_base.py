from __future__ import annotations

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import NO_BLOCK
from pagedmlx.ops.base import PagedBatch
from tests.support.batches import make_batch


def test_the_unused_tail_of_a_table_becomes_a_valid_block() -> None:
    rng = np.random.default_rng(0)
    host = make_batch([(3, 1), (0, 9)], block_size=4, num_blocks=8, rng=rng, num_groups=2)
    batch = PagedBatch(host)
    assert batch.host is host
    for on_device, group in zip(batch.groups, host.groups, strict=True):
        tables = np.array(on_device.block_tables)
        unused = group.block_tables == NO_BLOCK
        assert unused.any()
        assert (tables[unused] == 0).all()
        assert (tables[~unused] == group.block_tables[~unused]).all()
        assert np.array_equal(np.array(on_device.slot_mapping), group.slot_mapping)


def test_tokens_positions_and_lengths_are_those_of_the_host() -> None:
    host = make_batch([(3, 1), (2, 9)], block_size=4, num_blocks=8, rng=np.random.default_rng(0))
    batch = PagedBatch(host)
    assert np.array_equal(np.array(batch.token_ids), host.token_ids)
    assert batch.positions.tolist() == [3, *range(2, 11)]
    assert batch.context_lens.tolist() == [4, 11]


def test_padding_is_written_nowhere() -> None:
    host = make_batch([(3, 1), (2, 9)], block_size=4, num_blocks=8, rng=np.random.default_rng(0))
    batch = PagedBatch(host, 6)
    assert batch.num_rows == 16
    assert np.array_equal(np.array(batch.token_ids), [*host.token_ids, *[0] * 6])
    assert batch.positions.tolist() == [3, *range(2, 11), *[0] * 6]
    slots = np.array(batch.groups[0].slot_mapping)
    assert np.array_equal(slots[:10], host.groups[0].slot_mapping)
    assert (slots[10:] < 0).all()


def test_positions_of_few_rows_are_padded_for_kernels() -> None:
    host = make_batch([(3, 1), (7, 1)], block_size=4, num_blocks=8, rng=np.random.default_rng(0))
    batch = PagedBatch(host)
    assert batch.num_rows == 2
    assert batch.positions.tolist() == [3, 7, *[0] * 6]


def test_nothing_goes_to_the_device_before_it_is_asked_for() -> None:
    host = make_batch([(3, 1), (7, 1)], block_size=4, num_blocks=8, rng=np.random.default_rng(0))
    batch = PagedBatch(host)
    assert set(vars(batch)) == {"host", "num_padding", "is_traced"}
    assert batch.token_ids is batch.token_ids
    assert batch.groups[0].slot_mapping is batch.groups[0].slot_mapping


def test_arrays_of_the_device_take_the_place_of_the_hosts() -> None:
    host = make_batch(
        [(3, 1), (7, 1)], block_size=4, num_blocks=8, rng=np.random.default_rng(0), num_groups=2
    )
    tokens, positions, slots = mx.array([5, 6]), mx.zeros(8), [mx.array([1]), mx.array([2])]
    batch = PagedBatch(host).given(token_ids=tokens, positions=positions, slot_mappings=slots)
    assert batch.token_ids is tokens
    assert batch.positions is positions
    assert [group.slot_mapping for group in batch.groups] == slots
    assert PagedBatch(host).given(token_ids=tokens).positions.tolist() == [3, 7, *[0] * 6]
