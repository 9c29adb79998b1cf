"""Steps of made-up sequences that no scheduler knows of, to see what they give and cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.core.batch import NO_BLOCK, batch_of
from pagedmlx.core.request import Request
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.sequence import Sequence
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import PoolWriter
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.ops.base import PagedBatch

Tokens = npt.NDArray[np.integer[Any]]


class DummySequence:
    """A sequence with blocks of its own choice.

    Args:
        seq_id: Its id.
        table: Its blocks in every group.

    Attributes:
        start: Tokens that are there already.
    """

    def __init__(self, seq_id: int, table: Tokens) -> None:
        request = Request(f"dummy {seq_id}", (0,), SamplingParams())
        self.sequence = Sequence(seq_id, request, 0, [], ())
        self.table = table
        self.start = 0


def run_step(
    adapter: ModelAdapter,
    store: KVStore,
    parts: Iterable[tuple[DummySequence, Tokens]],
    num_padding: int = 0,
) -> mx.array:
    """Run the next tokens of some sequences; logits (S or more, vocab_size) of the last of each.

    Args:
        adapter: The model.
        store: The pool.
        parts: Sequences with their tokens, those with a single one first or none of them.
        num_padding: Rows of padding, where they may be; their logits are the last.
    """
    parts = list(parts)
    spans = [(sequence.start, len(tokens)) for sequence, tokens in parts]
    widths = [-(-sum(span) // adapter.layout.block_size) for span in spans]
    table = np.full((len(parts), max(widths)), NO_BLOCK, np.int32)
    for row, (sequence, _), width in zip(table, parts, widths, strict=True):
        row[:width] = sequence.table[:width]
    host = batch_of(
        spans,
        [table] * len(adapter.layout.groups),
        adapter.layout.block_size,
        token_ids=np.concatenate([tokens for _, tokens in parts]).astype(np.int32),
        sequences=tuple(sequence.sequence for sequence, _ in parts),
    )
    is_padded = host.only_decodes and adapter.takes_padding(store)
    logits = adapter.forward(PagedBatch(host, num_padding if is_padded else 0), store)
    store.submit(logits)
    for sequence, tokens in parts:
        sequence.start += len(tokens)
    return logits


def made_up_tokens(adapter: ModelAdapter, length: int, first: int = 0) -> Tokens:
    """Tokens from all over the vocabulary, so that a mixture of experts asks many of them."""
    return ((first + np.arange(length)) * 7919 % adapter.vocab_size).astype(np.int32)


def make_pool(adapter: ModelAdapter, num_tokens: int, writer: PoolWriter | None = None) -> KVStore:
    """A pool that just holds so many tokens; updated functionally if there is no writer."""
    num_blocks = -(-num_tokens // adapter.layout.block_size)
    return KVStore(adapter.layout, (num_blocks,) * len(adapter.layout.groups), writer=writer)


def run_chunk(adapter: ModelAdapter, num_tokens: int, store: KVStore) -> None:
    """Compute the first tokens of a prompt, and wait for them; the pool may have been used."""
    table = np.arange(-(-num_tokens // adapter.layout.block_size), dtype=np.int32)
    parts = [(DummySequence(0, table), made_up_tokens(adapter, num_tokens))]
    mx.eval(run_step(adapter, store, parts))


def seconds_for(run: Callable[[], None]) -> float:
    """Time until the device is done with what this has it do, and with nothing else."""
    mx.synchronize()
    start = time.perf_counter()
    run()
    mx.synchronize()
    return time.perf_counter() - start
