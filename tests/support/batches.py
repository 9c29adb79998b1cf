"""Batches built by hand, without a scheduler: shuffled block tables, decode rows and chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedmlx.core.batch import NO_BLOCK, BatchArrays, Int32Array, batch_of


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
    counts = [count for _, count in spans]
    num_decodes = counts.count(1)
    assert counts[:num_decodes] == [1] * num_decodes, "single-row sequences come first"
    token_ids = rng.integers(0, 256, sum(counts), dtype=np.int32)
    tables = [_make_table(spans, block_size, num_blocks, rng) for _ in range(num_groups)]
    return batch_of(spans, tables, block_size, token_ids=token_ids)


def slots_of(
    batch: BatchArrays, group: int, sequence: int, block_size: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Slots of tokens [0, context_len) of one sequence."""
    tokens = np.arange(batch.context_lens[sequence])
    blocks = batch.groups[group].block_tables[sequence, tokens // block_size].astype(np.int64)
    return blocks * block_size + tokens % block_size


def _make_table(
    spans: Sequence[tuple[int, int]], block_size: int, num_blocks: int, rng: np.random.Generator
) -> Int32Array:
    widths = [-(-sum(span) // block_size) for span in spans]
    free = iter(rng.permutation(num_blocks))
    table = np.full((len(spans), max(widths)), NO_BLOCK, dtype=np.int32)
    for row, width in zip(table, widths, strict=True):
        row[:width] = [next(free) for _ in range(width)]
    return table
