"""Drives an adapter by hand: sequences with scattered tables, and steps that mix their tokens."""

from __future__ import annotations

from collections import abc

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import NO_BLOCK, BatchArrays, GroupArrays
from pagedmlx.core.request import Request
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.sequence import Sequence
from pagedmlx.kv.store import KVStore
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.ops.base import PagedBatch


class PagedRun:
    """A pool full of NaN and ``num_sequences`` sequences with shuffled block tables."""

    def __init__(
        self, adapter: ModelAdapter, num_sequences: int, max_tokens: int, seed: int = 0
    ) -> None:
        self.adapter = adapter
        block_size = adapter.layout.block_size
        width = -(-max_tokens // block_size)
        num_groups = len(adapter.layout.groups)
        rng = np.random.default_rng(seed)
        # Groups have pools of different sizes and tables of their own.
        self.num_blocks = tuple(num_sequences * width + group for group in range(num_groups))
        self.tables = [
            rng.permutation(count)[: num_sequences * width]
            .reshape(num_sequences, width)
            .astype(np.int32)
            for count in self.num_blocks
        ]
        self.store = KVStore(adapter.layout, self.num_blocks, fill=float("nan"))
        self.lengths = [0] * num_sequences
        self.sequences = [
            Sequence(index, Request(str(index), (0,), SamplingParams()), 0, [], ())
            for index in range(num_sequences)
        ]

    def step(
        self,
        parts: abc.Sequence[tuple[int, abc.Sequence[int]]],
        sampling: abc.Sequence[int] | None = None,
    ) -> np.ndarray:
        """Compute each sequence's next tokens; logits of the last of each part in ``sampling``.

        Args:
            parts: (sequence, its next tokens), parts of one token first.
            sampling: Indexes of the parts to sample from; all when None.
        """
        starts = [self.lengths[sequence] for sequence, _ in parts]
        counts = np.array([len(tokens) for _, tokens in parts], np.int32)
        ends = (np.array(starts) + counts).astype(np.int32)
        query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate(
            [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        ).astype(np.int32)
        owners = np.repeat([sequence for sequence, _ in parts], counts)
        rows = [query_start_loc[part + 1] - 1 for part in (sampling or range(len(parts)))]
        if sampling is not None and not sampling:
            rows = []
        batch = BatchArrays(
            sequences=tuple(self.sequences[sequence] for sequence, _ in parts),
            num_decodes=int(np.count_nonzero(counts == 1)),
            token_ids=np.concatenate([tokens for _, tokens in parts]).astype(np.int32),
            positions=positions,
            query_start_loc=query_start_loc,
            context_lens=ends,
            sample_rows=np.array(rows, np.int32),
            sample_sequences=(),
            groups=tuple(
                self._group(table, parts, ends, owners, positions) for table in self.tables
            ),
        )
        logits = self.adapter.forward(PagedBatch(batch), self.store)
        self.store.commit(logits)
        for (sequence, _), end in zip(parts, ends, strict=True):
            self.lengths[sequence] = int(end)
        return np.array(logits.astype(mx.float32))

    def _group(
        self,
        table: np.ndarray,
        parts: abc.Sequence[tuple[int, abc.Sequence[int]]],
        ends: np.ndarray,
        owners: np.ndarray,
        positions: np.ndarray,
    ) -> GroupArrays:
        block_size = self.adapter.layout.block_size
        widths = -(-ends // block_size)
        block_tables = np.full((len(parts), widths.max()), NO_BLOCK, np.int32)
        for row, ((sequence, _), width) in enumerate(zip(parts, widths, strict=True)):
            block_tables[row, :width] = table[sequence, :width]
        blocks = table[owners, positions // block_size].astype(np.int64)
        nothing = np.empty(0, np.int32)
        return GroupArrays(
            slot_mapping=blocks * block_size + positions % block_size,
            block_tables=block_tables,
            copy_src=nothing,
            copy_dst=nothing,
        )
