"""A block map that went through JSON is the same; what is none is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.core.snapshot import EngineSnapshot
from pagedmlx.core.snapshot_json import snapshot_from_json, snapshot_to_json
from tests.support.core import FULL, WINDOW, make_driver, make_request


def snapshot_after(num_steps: int) -> EngineSnapshot:
    driver = make_driver(9, 4, groups=(FULL, WINDOW))
    driver.add(make_request(range(10, 17), 5, request_id="two", n=2))
    driver.add(make_request(range(30, 50), 3, request_id="waits"))
    for _ in range(num_steps):
        driver.step()
    return driver.scheduler.snapshot(driver.scheduler.stats())


def through_json(snapshot: EngineSnapshot) -> tuple[dict[str, Any], dict[str, Any]]:
    both = dataclasses.asdict(snapshot.stats), snapshot_to_json(snapshot)
    return tuple(json.loads(json.dumps(each)) for each in both)  # type: ignore[return-value]


@pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
def test_a_map_survives_the_way(num_steps: int) -> None:
    snapshot = snapshot_after(num_steps)
    found = snapshot_from_json(*through_json(snapshot))
    assert found.stats == snapshot.stats
    for field in ("owners", "ref_counts", "is_cached"):
        for ours, theirs in zip(snapshot.pools, found.pools, strict=True):
            assert np.array_equal(getattr(ours, field), getattr(theirs, field))
            assert getattr(ours, field).dtype == getattr(theirs, field).dtype
    for ours, theirs in zip(snapshot.sequences, found.sequences, strict=True):
        assert all(map(np.array_equal, ours.block_ids, theirs.block_ids))
        assert dataclasses.replace(ours, block_ids=()) == dataclasses.replace(theirs, block_ids=())


def test_a_large_pool_is_a_short_text() -> None:
    driver = make_driver(100_000, 4)
    driver.add(make_request(range(40), 5))
    driver.step()
    snapshot = driver.scheduler.snapshot(driver.scheduler.stats())
    assert len(json.dumps(snapshot_to_json(snapshot))) < 1000


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(data=st.data(), junk=JUNK)
def test_what_is_no_map_is_refused_as_such(data: st.DataObject, junk: Any) -> None:
    stats, blocks = through_json(snapshot_after(3))
    places: list[tuple[Any, Any]] = [(blocks, name) for name in blocks]
    places += [(pool, name) for pool in blocks["pools"] for name in pool]
    places += [(each, name) for each in blocks["sequences"] for name in each]
    container, name = data.draw(st.sampled_from(places))
    container[name] = junk
    try:
        found = snapshot_from_json(stats, blocks)
    except ValueError:
        pass  # refused
    else:
        for pool in found.pools:
            assert len(pool.owners) == len(pool.ref_counts) == len(pool.is_cached)


@pytest.mark.parametrize("runs", [[[0, 2**62], [0, 2**62]], [[0, -1]], [[5, 9]], [[0]]])
def test_runs_that_no_pool_has_are_refused(runs: list[list[int]]) -> None:
    stats, blocks = through_json(snapshot_after(3))
    blocks["pools"][0]["owners"] = runs
    with pytest.raises(ValueError):  # noqa: PT011
        snapshot_from_json(stats, blocks)
