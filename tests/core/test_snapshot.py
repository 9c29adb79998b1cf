"""EngineSnapshot: the map of blocks agrees with tables and pool, whoever shares what."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedmlx.core.block import NO_BLOCK
from pagedmlx.core.snapshot import NOBODY, EngineSnapshot
from tests.support.core import FULL, WINDOW, Driver, make_driver, make_request


def look(driver: Driver) -> EngineSnapshot:
    return driver.scheduler.snapshot(driver.scheduler.stats())


def check_map(driver: Driver) -> None:
    snapshot = look(driver)
    stats = snapshot.stats
    for group, pool in enumerate(snapshot.pools):
        held = Counter(
            int(block_id)
            for sequence in snapshot.sequences
            for block_id in sequence.block_ids[group]
            if block_id != NO_BLOCK
        )
        assert {b: int(n) for b, n in enumerate(pool.ref_counts) if n} == dict(held)
        assert set(np.flatnonzero(pool.owners != NOBODY)) == set(held)
        for block_id in held:
            assert block_id in snapshot.sequences[pool.owners[block_id]].block_ids[group]
        assert not (pool.is_cached & (pool.ref_counts > 0)).any()
        if len(snapshot.pools) == 1:
            assert pool.is_cached.sum() == stats.num_cached_blocks
            assert (pool.ref_counts > 1).sum() == stats.num_shared_blocks
    assert [s.status for s in snapshot.sequences[: stats.num_running]] == (
        ["running"] * stats.num_running
    )
    for sequence in snapshot.sequences[stats.num_running :]:
        assert sequence.status in ("waiting", "preempted")
        assert not any(map(len, sequence.block_ids))


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 14), st.integers(1, 6), st.integers(1, 3)), max_size=5
    ),
    two_groups=st.booleans(),
)
def test_the_map_holds_after_every_step(
    requests: list[tuple[int, int, int]], two_groups: bool
) -> None:
    driver = make_driver(6, 4, groups=(FULL, WINDOW) if two_groups else (FULL,))
    for number, (length, max_tokens, n) in enumerate(requests):
        request = make_request(range(length), max_tokens, request_id=f"{number}", n=n)
        driver.add(request)
    check_map(driver)
    while driver.scheduler.has_unfinished:
        driver.step()
        check_map(driver)


def test_who_waits_for_blocks_says_how_many_and_who_waits_for_its_turn_none() -> None:
    driver = make_driver(6, 4, max_num_seqs=2)
    driver.add(make_request(range(10, 30), 3, request_id="runs"))
    driver.add(make_request(range(30, 42), 3, request_id="big"))
    driver.add(make_request(range(50, 52), 1, request_id="small"))
    driver.step()
    running, big, *_ = look(driver).sequences
    assert (running.request_id, running.num_missing_blocks) == ("runs", 0)
    assert (big.request_id, big.num_missing_blocks) == ("big", 2)
    assert (big.num_prompt_tokens, big.num_output_tokens) == (12, 0)
