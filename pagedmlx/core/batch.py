"""BatchArrays: a step as flat numpy arrays, one row a token (the layout "token rows")."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

import numpy as np
import numpy.typing as npt

from pagedmlx.core.block import NO_BLOCK
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.step import Step

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupArrays:
    """The part of a batch that differs between KV groups.

    Attributes:
        slot_mapping: (T,) int64; where each row's K and V are written, all distinct.
        block_tables: (S, B) int32; the blocks that hold [0, context_len) of each sequence, then
            NO_BLOCK; B is that of the longest sequence. NO_BLOCK also where a window has passed.
        copy_src: (C,) int32; blocks to copy from, before anything is written.
        copy_dst: (C,) int32; blocks to copy to, all distinct.
    """

    slot_mapping: Int64Array
    block_tables: Int32Array
    copy_src: Int32Array
    copy_dst: Int32Array


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows whose hidden states are wanted, as their sum.

    Attributes:
        sequence: Whose embedding they are for.
        rows: They follow each other; at least one.
    """

    sequence: Sequence
    rows: range


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """One step over S sequences with T rows in all.

    Sequence s owns the rows [query_start_loc[s], query_start_loc[s + 1]).

    Attributes:
        sequences: The S sequences, those with a single row first.
        num_decodes: How many of them have a single row.
        token_ids: (T,) int32.
        positions: (T,) int32; a row's position within its sequence.
        query_start_loc: (S + 1,) int32.
        context_lens: (S,) int32; tokens whose K and V are in the pool once this step has written.
        sample_rows: (R,) int32; the rows whose logits are needed, in order.
        sample_sequences: The R sequences that they belong to.
        groups: One entry for each KV group.
        unread_rows: (P,) int32; the rows whose token is not known here, and 0 in ``token_ids``.
        unread_sequences: The P sequences for which the step before sampled those tokens.
        prompt_places: (Q,) int32; which of the R rows tell how likely the prompt's next token is;
            from each of the others a token is sampled.
        pooled: What embeddings need of this step, by rows.
    """

    sequences: tuple[Sequence, ...]
    num_decodes: int
    token_ids: Int32Array
    positions: Int32Array
    query_start_loc: Int32Array
    context_lens: Int32Array
    sample_rows: Int32Array
    sample_sequences: tuple[Sequence, ...]
    groups: tuple[GroupArrays, ...]
    unread_rows: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    unread_sequences: tuple[Sequence, ...] = ()
    prompt_places: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    pooled: tuple[PooledRows, ...] = ()

    @property
    def num_rows(self) -> int:
        """T, the rows of the forward pass."""
        return len(self.token_ids)

    @property
    def only_samples(self) -> bool:
        """Whether logits of some rows are all that is wanted."""
        return len(self.sample_rows) > 0 and not self.pooled

    @property
    def only_decodes(self) -> bool:
        """Whether each sequence has a single row, and logits of all of them are needed."""
        return self.num_decodes == len(self.sample_rows) == self.num_rows


def batch_of(
    spans: Iterable[tuple[int, int]],
    tables: Iterable[Int32Array],
    block_size: int,
    *,
    token_ids: Int32Array | None = None,
    sequences: tuple[Sequence, ...] = (),
) -> BatchArrays:
    """A step without a scheduler, to try a model or kernels; logits of each last row are needed.

    Args:
        spans: First token and number of tokens that each of S sequences computes, those with a
            single one first.
        tables: (S, B) int32 block tables for each KV group.
        block_size: Tokens in one block.
        token_ids: (T,) int32; zeros if None.
        sequences: Whose rows they are, if that matters.
    """
    starts, counts = np.array(list(spans), dtype=np.int32).T
    query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    positions = np.arange(len(owners), dtype=np.int32) - (query_start_loc[:-1] - starts)[owners]
    nothing = np.empty(0, dtype=np.int32)
    return BatchArrays(
        sequences=sequences,
        num_decodes=int(np.count_nonzero(counts == 1)),
        token_ids=np.zeros(len(owners), np.int32) if token_ids is None else token_ids,
        positions=positions,
        query_start_loc=query_start_loc,
        context_lens=starts + counts,
        sample_rows=query_start_loc[1:] - 1,
        sample_sequences=sequences,
        groups=tuple(
            GroupArrays(_slots(each, owners, positions, block_size), each, nothing, nothing)
            for each in tables
        ),
    )


def build_batch(step: Step, block_size: int) -> BatchArrays:
    """Lay out a step's tokens, positions, slots and tables.

    Args:
        step: From ``Scheduler.schedule``; its sequences' tables already hold every block.
        block_size: Tokens in one block.
    """
    entries = step.scheduled
    starts = [entry.start for entry in entries]
    counts = [entry.num_tokens for entry in entries]
    token_ids = array("i")
    # The R rows with logits, and the P rows whose token is unread.
    sampling: list[int] = []
    sample_sequences: list[Sequence] = []
    unread: list[int] = []
    unread_sequences: list[Sequence] = []
    prompt_places: list[int] = []
    pooled: list[PooledRows] = []
    for entry in entries:
        sequence, first = entry.sequence, len(token_ids)
        token_ids.extend(sequence.token_ids[entry.start : entry.start + entry.num_tokens])
        if entry.is_unread:
            unread.append(len(token_ids))
            unread_sequences.append(sequence)
            token_ids.append(0)
        if entry.prompt_rows:
            shift = first - entry.start
            rows = range(entry.prompt_rows.start + shift, entry.prompt_rows.stop + shift)
            if sequence.request.pooling is not None:
                pooled.append(PooledRows(sequence, rows))
            else:
                prompt_places += range(len(sampling), len(sampling) + len(rows))
                sampling += rows
                sample_sequences += [sequence] * len(rows)
        if entry.needs_logits:
            sampling.append(len(token_ids) - 1)
            sample_sequences.append(sequence)
    # Which of the S sequences each of the T rows belongs to.
    owners = np.repeat(np.arange(len(entries), dtype=np.int32), counts)
    query_start_loc = np.array([0, *accumulate(counts)], dtype=np.int32)
    shifts = np.array(starts, dtype=np.int32) - query_start_loc[:-1]
    positions = np.arange(len(owners), dtype=np.int32) + shifts[owners]
    num_groups = len(entries[0].sequence.block_tables) if entries else 0
    return BatchArrays(
        sequences=tuple(entry.sequence for entry in entries),
        num_decodes=counts.count(1),
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=positions,
        query_start_loc=query_start_loc,
        context_lens=np.array(list(map(add, starts, counts)), dtype=np.int32),
        sample_rows=np.array(sampling, dtype=np.int32),
        sample_sequences=tuple(sample_sequences),
        groups=tuple(
            _build_group(step, group, block_size, positions, owners) for group in range(num_groups)
        ),
        unread_rows=np.array(unread, dtype=np.int32),
        unread_sequences=tuple(unread_sequences),
        prompt_places=np.array(prompt_places, dtype=np.int32),
        pooled=tuple(pooled),
    )


def _build_group(
    step: Step, group: int, block_size: int, positions: Int32Array, owners: Int32Array
) -> GroupArrays:
    tables = [
        entry.sequence.block_tables[group].as_array(
            -(-(entry.start + entry.num_tokens) // block_size)
        )
        for entry in step.scheduled
    ]
    block_tables = np.full((len(tables), max(map(len, tables))), NO_BLOCK, dtype=np.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    copies = [copy for copy in step.copies if copy.group == group]
    return GroupArrays(
        slot_mapping=_slots(block_tables, owners, positions, block_size),
        block_tables=block_tables,
        copy_src=np.array([copy.src for copy in copies], dtype=np.int32),
        copy_dst=np.array([copy.dst for copy in copies], dtype=np.int32),
    )


def _slots(
    tables: Int32Array, owners: Int32Array, positions: Int32Array, block_size: int
) -> Int64Array:
    places, offsets = np.divmod(positions, block_size)
    return tables[owners, places].astype(np.int64) * block_size + offsets
