"""EngineSnapshot as JSON and back: how a server's block map reaches a chat elsewhere.

Arrays by block id are runs of (value, count): a pool's blocks mostly lie in runs of equal ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedmlx.core.block import NO_BLOCK
from pagedmlx.core.snapshot import EngineSnapshot, PoolSnapshot, SequenceSnapshot
from pagedmlx.core.stats import EngineStats

MAX_BLOCKS = 1 << 24
"""Most blocks that are taken for a pool; what says more is no server of ours."""

_PLAIN = tuple(f.name for f in dataclasses.fields(SequenceSnapshot) if f.name != "block_ids")


def snapshot_to_json(snapshot: EngineSnapshot) -> dict[str, Any]:
    """Numbers, text, lists and mappings only; the counts are left to those who have them."""
    return {
        "sequences": [
            {name: getattr(sequence, name) for name in _PLAIN}
            | {"block_ids": [ids.tolist() for ids in sequence.block_ids]}
            for sequence in snapshot.sequences
        ],
        "pools": [
            {field.name: _runs(getattr(pool, field.name)) for field in dataclasses.fields(pool)}
            for pool in snapshot.pools
        ],
    }


def snapshot_from_json(stats: Mapping[str, Any], blocks: Mapping[str, Any]) -> EngineSnapshot:
    """The inverse.

    Args:
        stats: Fields of ``EngineStats``; others are passed over, since servers may be newer.
        blocks: From ``snapshot_to_json``.

    Raises:
        ValueError: It is nothing that ``snapshot_to_json`` gives.
    """
    try:
        names = {field.name for field in dataclasses.fields(EngineStats)}
        pools = tuple(_pool(each) for each in blocks["pools"])
        sequences = tuple(_sequence(each, pools) for each in blocks["sequences"])
        counts = EngineStats(**{name: value for name, value in stats.items() if name in names})
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"no block map: {type(error).__name__}: {error}") from error
    for pool in pools:
        if len(pool.owners) and not (-1 <= pool.owners.min() <= pool.owners.max() < len(sequences)):
            raise ValueError("no block map: blocks belong to sequences that are not there")
    return EngineSnapshot(counts, sequences, pools)


def _runs(values: npt.NDArray[Any]) -> list[list[int]]:
    if not len(values):
        return []
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    counts = np.diff(np.append(starts, len(values)))
    return np.stack([values[starts].astype(np.int64), counts], axis=1).tolist()


def _array(runs: Sequence[Sequence[int]], dtype: type[Any]) -> npt.NDArray[Any]:
    pairs = np.array(runs, dtype=np.int64).reshape(-1, 2)
    values, counts = pairs[:, 0], pairs[:, 1]
    # Each on its own: a sum of large numbers may come round to a small one.
    if (counts < 0).any() or (counts > MAX_BLOCKS).any() or counts.sum() > MAX_BLOCKS:
        raise ValueError(f"no block map: runs of {counts.sum()} blocks")
    return np.repeat(values, counts).astype(dtype)


def _pool(pool: Mapping[str, Any]) -> PoolSnapshot:
    owners = _array(pool["owners"], np.int32)
    ref_counts = _array(pool["ref_counts"], np.int32)
    is_cached = _array(pool["is_cached"], np.bool_)
    if not len(owners) == len(ref_counts) == len(is_cached):
        raise ValueError("no block map: arrays of a pool differ in length")
    return PoolSnapshot(owners, ref_counts, is_cached)


def _sequence(sequence: Mapping[str, Any], pools: tuple[PoolSnapshot, ...]) -> SequenceSnapshot:
    tables = sequence["block_ids"]
    if len(tables) != len(pools):
        raise ValueError("no block map: a sequence has tables for other pools")
    block_ids = tuple(np.array(ids, dtype=np.int32).reshape(-1) for ids in tables)
    for ids, pool in zip(block_ids, pools, strict=True):
        if len(ids) and not NO_BLOCK <= ids.min() <= ids.max() < len(pool.owners):
            raise ValueError("no block map: a table names blocks that are not there")
    plain = {name: sequence[name] for name in _PLAIN}
    for name, value in plain.items():
        if not isinstance(value, str if name in ("request_id", "status") else int):
            raise ValueError(f"no block map: {name} is {value!r}")
    return SequenceSnapshot(**plain, block_ids=block_ids)
