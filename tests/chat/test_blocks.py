"""What the block map shows is what the engine's snapshot says."""

from __future__ import annotations

import numpy as np
import pytest

from pagedmlx.chat.blocks import (
    CACHED,
    COPIED,
    FREE,
    NO_SLOT,
    SHARED,
    USED,
    BlockHistory,
    holders,
    savings,
)
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.snapshot import EngineSnapshot, PoolSnapshot, SequenceSnapshot
from pagedmlx.core.stats import EngineStats
from pagedmlx.engine.outputs import Job
from tests.support.engines import make_engine


def sequence(name: str, blocks: list[int], *, index: int = 0, **fields: int) -> SequenceSnapshot:
    values = {
        "num_prompt_tokens": 4 * len(blocks),
        "num_output_tokens": 0,
        "num_computed_tokens": 4 * len(blocks),
        "num_cached_tokens": 0,
        "num_missing_blocks": 0,
        "num_preemptions": 0,
        "priority": 0,
        **fields,
    }
    table = (np.array(blocks, np.int32),)
    return SequenceSnapshot(
        request_id=name, index=index, status="running", block_ids=table, **values
    )


def snapshot(
    num_blocks: int, *sequences: SequenceSnapshot, cached: tuple[int, ...] = ()
) -> EngineSnapshot:
    owners = np.full(num_blocks, -1, np.int32)
    refs = np.zeros(num_blocks, np.int32)
    for place in reversed(range(len(sequences))):
        owners[sequences[place].block_ids[0]] = place
        refs[sequences[place].block_ids[0]] += 1
    is_cached = np.zeros(num_blocks, np.bool_)
    is_cached[list(cached)] = True
    stats = EngineStats(block_size=4, num_blocks=num_blocks, block_bytes=100)
    return EngineSnapshot(stats, sequences, (PoolSnapshot(owners, refs, is_cached),))


def test_each_block_has_its_state_and_owner() -> None:
    history = BlockHistory()
    seen = snapshot(6, sequence("a", [0, 1]), sequence("b", [0, 2]), cached=(4,))
    history.add(seen, {"a": 0, "b": 1}, 0.0)
    cells = history.cells(100)
    assert cells.per_cell == 1
    assert cells.kinds.tolist() == [SHARED, USED, USED, FREE, CACHED, FREE]
    assert cells.slots.tolist() == [0, 0, 1, NO_SLOT, NO_SLOT, NO_SLOT]
    assert cells.counts.tolist() == [2, 1, 1, 0, 0, 0]


def test_a_cached_block_is_still_known_as_its_last_owners() -> None:
    history = BlockHistory()
    history.add(snapshot(3, sequence("a", [0, 1])), {"a": 5}, 0.0)
    history.add(snapshot(3, cached=(0,)), {}, 1.0)
    assert history.cells(3).slots.tolist() == [5, NO_SLOT, NO_SLOT]
    history.add(snapshot(3, sequence("b", [0])), {}, 2.0)
    assert history.slot(0) == NO_SLOT


def test_a_block_that_took_a_shared_ones_place_was_copied_and_flashes_for_a_moment() -> None:
    history = BlockHistory()
    slots = {"a": 0}
    history.add(snapshot(4, sequence("a", [0]), sequence("a", [0], index=1)), slots, 0.0)
    after = snapshot(4, sequence("a", [0]), sequence("a", [1], index=1))
    history.add(after, slots, 0.1)
    assert history.cells(4).kinds.tolist() == [USED, COPIED, FREE, FREE]
    history.add(after, slots, 9.0)
    assert history.cells(4).kinds.tolist() == [USED, USED, FREE, FREE]


def test_a_preempted_sequence_that_comes_back_elsewhere_copied_nothing() -> None:
    history = BlockHistory()
    history.add(snapshot(4, sequence("a", [0])), {}, 0.0)
    history.add(snapshot(4, sequence("a", [2], num_preemptions=1)), {}, 0.1)
    assert history.cells(4).kinds.tolist() == [FREE, FREE, USED, FREE]


def test_a_new_sequence_that_began_within_a_cached_block_copied_it() -> None:
    history = BlockHistory()
    history.add(snapshot(4, sequence("a", [0, 2], num_cached_tokens=6)), {}, 0.0)
    assert history.cells(4).kinds.tolist() == [USED, FREE, COPIED, FREE]


@pytest.mark.parametrize("num_blocks", [1, 7, 96, 100_000])
@pytest.mark.parametrize("num_cells", [1, 5, 160, 2_000])
def test_any_pool_fits_any_map_and_no_block_is_left_out(num_blocks: int, num_cells: int) -> None:
    history = BlockHistory()
    last = num_blocks - 1
    history.add(snapshot(num_blocks, sequence("a", [last])), {"a": 3}, 0.0)
    cells = history.cells(num_cells)
    assert cells.kinds.size <= num_cells or cells.per_cell == 1
    assert (cells.kinds.size - 1) * cells.per_cell < num_blocks <= cells.kinds.size * cells.per_cell
    assert cells.kinds[last // cells.per_cell] == USED
    assert cells.slots[last // cells.per_cell] == 3
    assert np.count_nonzero(cells.kinds) == 1


def test_a_cell_of_many_blocks_tells_the_most_notable_and_how_full_it_is() -> None:
    history = BlockHistory()
    seen = snapshot(8, sequence("a", [0, 1, 4]), sequence("b", [4, 5, 6, 7]), cached=(2,))
    history.add(seen, {"a": 0, "b": 1}, 0.0)
    cells = history.cells(2)
    assert cells.per_cell == 4
    assert cells.kinds.tolist() == [USED, SHARED]
    assert cells.fills.tolist() == [0.5, 1.0]
    assert cells.counts.tolist() == [1, 2]


def test_what_was_never_used_is_not_shown() -> None:
    history = BlockHistory()
    history.add(snapshot(1456, sequence("a", [3])), {"a": 0}, 0.0)
    assert history.cells(9999).kinds.size == 64
    history.add(snapshot(1456, sequence("a", [64])), {"a": 0}, 0.1)
    assert history.cells(9999).kinds.size == 128
    history.add(snapshot(1456), {}, 0.2)
    assert history.cells(9999).kinds.size == 128
    history.add(snapshot(1456, cached=(1455,)), {}, 0.3)
    assert history.cells(9999).kinds.size == 1456


def test_a_pool_of_another_size_begins_anew() -> None:
    history = BlockHistory()
    history.add(snapshot(3, sequence("a", [2])), {"a": 0}, 0.0)
    history.add(snapshot(5, cached=(2,)), {}, 0.1)
    assert history.cells(5).slots.tolist() == [NO_SLOT] * 5


def test_holders_tell_position_and_filled_slots() -> None:
    seen = snapshot(4, sequence("a", [3, 1], num_computed_tokens=6), sequence("b", [3]))
    assert [
        (each.sequence.request_id, each.position, each.num_tokens) for each in holders(seen, 3)
    ] == [
        ("a", 0, 4),
        ("b", 0, 4),
    ]
    (holder,) = holders(seen, 1)
    assert (holder.position, holder.num_tokens) == (1, 2)
    assert holders(seen, 0) == []


def test_savings_are_against_full_length_caches_and_copies() -> None:
    seen = snapshot(9, sequence("a", [0, 1]), sequence("b", [0, 2]))
    found = savings(seen, 20)
    assert found.used_bytes == 300
    assert found.reserved_bytes == 2 * 5 * 100
    assert found.shared_bytes == 100
    assert found.paging_bytes == 700
    assert savings(seen, None).paging_bytes == 0
    assert savings(snapshot(2), 20).reserved_bytes == 0


def test_the_map_agrees_with_an_engine_that_forks_and_copies() -> None:
    engine = make_engine(num_blocks=32)
    params = SamplingParams(n=3, max_tokens=8, temperature=1.0, seed=1, ignore_eos=True)
    engine.add_request(Job(prompt="abcdef", sampling_params=params, request_id="a"))
    history = BlockHistory()
    seen_kinds: set[int] = set()
    now_s = 0.0
    while engine.has_unfinished:
        engine.step()
        now_s += 0.01
        history.add(engine.snapshot(), {"a": 0}, now_s)
        cells = history.cells(32)
        stats = engine.stats()
        held = (cells.kinds != FREE) & (cells.kinds != CACHED)
        assert np.count_nonzero(held) == stats.num_used_blocks
        assert np.count_nonzero(cells.kinds == CACHED) == stats.num_cached_blocks
        assert np.count_nonzero(cells.counts > 1) == stats.num_shared_blocks
        seen_kinds |= set(cells.kinds.tolist())
    assert {SHARED, COPIED, USED} <= seen_kinds
