"""RowLayout and Part: how a step's tokens are laid out for the calls of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import BatchArrays, GroupArrays, PooledRows
from pagedmlx.ops.base import PagedBatch


class RowLayout(StrEnum):
    """How the tokens of a step are laid out for the model, the best way first.

    TOKEN_ROWS: every token is a row of its own, (T, 1), with its own position: one call.
    SEQUENCE_ROWS: decode as (B, 1), each prefill chunk as (1, L); for models that carry a state
    from token to token or read gathered K and V.
    SINGLE_ROWS: each sequence by itself, (1, L), with its position as a plain number; for models
    whose code is right for one sequence alone.
    """

    TOKEN_ROWS = "token rows"
    SEQUENCE_ROWS = "sequence rows"
    SINGLE_ROWS = "single rows"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The rows of one call of the model: S sequences with L tokens each.

    Attributes:
        batch: These rows only, and padding.
        offset: Tokens before the rows: (S,) int32, or a plain number for one sequence.
        num_sequences: S.
        length: L.
        gathers: Whether the model is given the K and V that its rows see, to read them itself.
        mask_ndim: Axes of the masks that it is given then.
    """

    batch: PagedBatch
    offset: mx.array | int
    num_sequences: int
    length: int
    gathers: bool
    mask_ndim: int = 4

    @property
    def token_ids(self) -> mx.array:
        """(S, L) int32."""
        return self.batch.token_ids.reshape(self.num_sequences, self.length)


def token_rows(batch: PagedBatch) -> Part:
    """A whole step with each token as a row."""
    num_rows = batch.num_rows
    return Part(batch, batch.positions[:num_rows], num_rows, 1, gathers=False)


def sequence_rows(
    batch: PagedBatch, *, gathers: bool, mask_ndim: int, max_tokens: int | None, fork_points: bool
) -> Iterator[Part]:
    """Cut a step into calls of sequences with equally many rows.

    Args:
        batch: The step.
        gathers: As in ``Part``.
        mask_ndim: Likewise.
        max_tokens: Most tokens whose K and V sequences that decode together may gather, padding
            included; 0 is each by itself, None is no limit.
        fork_points: End a part where the outputs of a request fork: before the last token of its
            prompt.
    """
    host = batch.host

    def part(first: int, count: int, start: int, end: int) -> Part:
        length = (end - start) // count
        rows = batch
        if (start, end) != (0, host.num_rows):
            rows = _slice(batch, first, count, start, end)
        offset = batch.positions[start:end] if count > 1 else int(host.positions[start])
        return Part(rows, offset, count, length, gathers, mask_ndim)

    first = 0
    for count in _decodes(host.context_lens[: host.num_decodes].tolist(), max_tokens):
        yield part(first, count, first, first + count)
        first += count
    for index in range(host.num_decodes, len(host.context_lens)):
        start, end = host.query_start_loc[index : index + 2].tolist()
        fork = _fork_row(host, index) if fork_points else start
        if start < fork < end:
            yield part(index, 1, start, fork)
            start = fork
        yield part(index, 1, start, end)


def _decodes(lengths: list[int], max_tokens: int | None) -> Iterator[int]:
    """How many of the sequences that decode go together, in their order."""
    count = longest = 0
    for length in lengths:
        longest = max(longest, length)
        if count and max_tokens is not None and (count + 1) * longest > max_tokens:
            yield count
            count, longest = 0, length
        count += 1
    if count:
        yield count


def _fork_row(host: BatchArrays, index: int) -> int:
    """The row of the last token of a prompt that has several outputs, wherever it is."""
    request = host.sequences[index].request
    if request.params.n == 1:
        return 0
    start = int(host.query_start_loc[index])
    return start + len(request.prompt_token_ids) - 1 - int(host.positions[start])


def _slice(batch: PagedBatch, first: int, count: int, start: int, end: int) -> PagedBatch:
    host, rows, sequences = batch.host, slice(start, end), slice(first, first + count)
    length = (end - start) // count
    positions = host.positions[rows]
    sampling = np.flatnonzero((host.sample_rows >= start) & (host.sample_rows < end))
    nothing = np.empty(0, np.int32)
    part = BatchArrays(
        sequences=host.sequences[sequences],
        num_decodes=count if length == 1 else 0,
        token_ids=host.token_ids[rows],
        positions=positions,
        query_start_loc=np.arange(0, end - start + 1, length, dtype=np.int32),
        context_lens=positions[length - 1 :: length] + 1,
        sample_rows=host.sample_rows[sampling] - start,
        sample_sequences=tuple(host.sample_sequences[at] for at in sampling)
        if host.sample_sequences
        else (),
        groups=tuple(
            GroupArrays(
                slot_mapping=group.slot_mapping[rows],
                block_tables=group.block_tables[sequences],
                copy_src=nothing,
                copy_dst=nothing,
            )
            for group in host.groups
        ),
        pooled=tuple(
            PooledRows(each.sequence, range(each.rows.start - start, each.rows.stop - start))
            for each in host.pooled
            if start <= each.rows.start < end
        ),
    )
    return PagedBatch(part).given(token_ids=batch.token_ids[rows])
