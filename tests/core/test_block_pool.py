from __future__ import annotations

import pytest

from pagedmlx.core.block_pool import BlockPool
from pagedmlx.core.block_table import BlockTable
from pagedmlx.core.prefix import PrefixIndex


def test_a_block_freed_twice_or_revived_without_content_is_refused() -> None:
    pool = BlockPool(2, PrefixIndex())
    block = pool.allocate()
    pool.free([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])
    with pytest.raises(AssertionError, match="no content"):
        pool.share([block])


def test_an_empty_pool_gives_nothing() -> None:
    pool = BlockPool(1, PrefixIndex())
    pool.allocate()
    assert not pool.can_allocate(1)
    with pytest.raises(AssertionError, match="can_allocate"):
        pool.allocate()


def test_integrity_check_sees_a_leak_and_a_stale_index() -> None:
    pool = BlockPool(2, PrefixIndex())
    block = pool.allocate()
    pool.check_integrity({0: 1})
    with pytest.raises(AssertionError, match="held by 0 tables"):
        pool.check_integrity({})
    block.block_hash = b"never indexed"
    with pytest.raises(AssertionError, match="stale"):
        pool.check_integrity({0: 1})


def test_a_large_pool_costs_nothing_until_it_fills() -> None:
    pool = BlockPool(10**9, PrefixIndex())
    assert pool.num_free_blocks == 10**9
    assert pool.allocate().block_id == 0
    assert pool.num_available_blocks == 10**9 - 1


def test_a_table_keeps_its_ids_in_step_with_its_blocks_however_long_it_grows() -> None:
    pool = BlockPool(100, PrefixIndex())
    table, other = BlockTable(pool), BlockTable(pool)
    for _ in range(40):
        table.append()
    assert table.as_array().tolist() == list(range(40))
    assert table.as_array(3).tolist() == [0, 1, 2]
    other.share(table.blocks[:2])
    old, new = other.replace(1)
    assert (old.block_id, new.block_id) == (1, 40)
    assert other.as_array().tolist() == [0, 40]
    assert (old.ref_count, new.ref_count) == (1, 1)
    table.truncate(2)
    assert table.as_array().tolist() == [0, 1]
    table.release()
    other.release()
    assert pool.num_used_blocks == 0


def test_the_array_of_a_table_is_a_copy() -> None:
    pool = BlockPool(4, PrefixIndex())
    table = BlockTable(pool)
    table.append()
    table.as_array()[0] = 99
    assert table.as_array().tolist() == [0]
