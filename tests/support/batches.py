"""Batches built by hand, without a scheduler: shuffled block tables, decode rows and chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedmlx.core.batch import NO_BLOCK, BatchArrays, GroupArrays


def make_batch(
    spans: Sequence[tuple[int, int]],
    *,
    block_size: int,
    num_blocks: int,
    rng: np.random.Generator,
    num_groups: int = 1,
) -> BatchArrays:
    """Lay out sequences that compute tokens [start, start + num_tokens), one span each.

    Every sequence gets its own blocks, drawn in random order. Spans of one token come first.
    """
    counts = np.array([count for _, count in spans], dtype=np.int32)
    ends = np.array([start + count for start, count in spans], dtype=np.int32)
    num_decodes = int(np.count_nonzero(counts == 1))
    assert (counts[:num_decodes] == 1).all(), "single-row sequences come first"
    positions = np.concatenate([np.arange(start, start + count) for start, count in spans])
    query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return BatchArrays(
        sequences=(),
        num_decodes=num_decodes,
        token_ids=rng.integers(0, 256, len(positions), dtype=np.int32),
        positions=positions.astype(np.int32),
        query_start_loc=query_start_loc,
        context_lens=ends,
        sample_rows=query_start_loc[1:] - 1,
        sample_sequences=(),
        groups=tuple(
            _make_group(positions, counts, ends, block_size, num_blocks, rng)
            for _ in range(num_groups)
        ),
    )


def slots_of(
    batch: BatchArrays, group: int, sequence: int, block_size: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Slots of tokens [0, context_len) of one sequence."""
    tokens = np.arange(batch.context_lens[sequence])
    blocks = batch.groups[group].block_tables[sequence, tokens // block_size].astype(np.int64)
    return blocks * block_size + tokens % block_size


def _make_group(
    positions: np.ndarray,
    counts: np.ndarray,
    ends: np.ndarray,
    block_size: int,
    num_blocks: int,
    rng: np.random.Generator,
) -> GroupArrays:
    widths = -(-ends // block_size)
    free = iter(rng.permutation(num_blocks))
    tables = np.full((len(ends), widths.max()), NO_BLOCK, dtype=np.int32)
    for row, width in zip(tables, widths, strict=True):
        row[:width] = [next(free) for _ in range(width)]
    owners = np.repeat(np.arange(len(counts)), counts)
    blocks = tables[owners, positions // block_size].astype(np.int64)
    empty = np.empty(0, dtype=np.int32)
    return GroupArrays(
        slot_mapping=blocks * block_size + positions % block_size,
        block_tables=tables,
        copy_src=empty,
        copy_dst=empty,
    )
