"""Compares a model over the paged cache with the same model over mlx-lm's own, at load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from pagedmlx.core.batch import BatchArrays, GroupArrays
from pagedmlx.errors import UnsupportedModelError, first_line
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import PoolWriter
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.ops.base import upload

NUM_DECODES = 3
MAX_PROMPT_TOKENS = 640
"""A window longer than this isn't passed: that would make big models slow to load."""

TOLERANCES = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
"""Largest difference between logits, as a share of the largest logit."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the probe saw.

    Attributes:
        num_prompt_tokens: Length of its prompt.
        error: Largest difference between logits, as a share of the largest logit.
        tolerance: What it may be for the types in use.
        passed_windows: Whether the prompt is longer than every sliding window of the model.
    """

    num_prompt_tokens: int
    error: float
    tolerance: float
    passed_windows: bool


def probe_model(adapter: ModelAdapter, writer: PoolWriter | None = None) -> ProbeResult:
    """Run a short prompt in two chunks, a copy on write and three decode steps, both ways.

    Uses a small pool of its own, on the backend that will serve. The decode steps follow each
    other as in serving: where the pool allows it, none waits for the one before.

    Args:
        adapter: Of the model to be served.
        writer: How the pool will be written; by functional update if None.

    Raises:
        UnsupportedModelError: The model fails on the way, or its logits differ by more than the
            types explain.
    """
    model_type = adapter.loaded.model_type
    try:
        result = _measure(adapter, writer)
    except Exception as error:
        # Anything may come out of model code that meets more rows than in the survey.
        reason = first_line(error)
        raise UnsupportedModelError(
            f"{model_type}: the model failed over the paged cache: {reason}"
        ) from error
    if not result.error <= result.tolerance:
        raise UnsupportedModelError(
            f"{model_type}: logits over the paged cache differ from mlx-lm's by "
            f"{result.error:.2g} of the largest; at most {result.tolerance:.2g} is allowed",
            hint="run this model with mlx-lm itself, and please report it",
        )
    return result


def _measure(adapter: ModelAdapter, writer: PoolWriter | None) -> ProbeResult:
    layout = adapter.layout
    block_size = layout.block_size
    windows = [group.window for group in layout.groups if group.window is not None]
    length = max(2 * block_size, min(max(windows, default=0), MAX_PROMPT_TOKENS)) + 1
    # The last block must be partly filled, so that copying it matters.
    length += length % block_size == 0
    prompt = (np.arange(length) * 7919 + 13) % adapter.vocab_size
    num_blocks = -(-(length + NUM_DECODES) // block_size) + 1
    store = KVStore(layout, (num_blocks,) * len(layout.groups), float("nan"), writer)
    # Block ids run backwards, so that order in the pool is not order in the sequence.
    table = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)
    caches = make_prompt_cache(adapter.loaded.model)

    expected = [adapter.last_logits(mx.array(prompt.astype(np.int32)), caches)]
    tokens: list[np.ndarray] = []
    for _ in range(NUM_DECODES):
        tokens.append(np.argmax(np.array(expected[-1].astype(mx.float32)), keepdims=True))
        expected.append(adapter.last_logits(mx.array(tokens[-1].astype(np.int32)), caches))

    chunk = block_size + 1
    _paged_logits(adapter, store, table, prompt[:chunk], 0)
    found = [_paged_logits(adapter, store, table, prompt[chunk:], chunk)]
    last = (length - 1) // block_size
    source, table[last] = table[last], 0
    for group in range(len(layout.groups)):
        store.copy_blocks(group, np.array([source], np.int32), np.array([0], np.int32))
    for step, token in enumerate(tokens):
        found.append(_paged_logits(adapter, store, table, token, length + step))

    return ProbeResult(
        num_prompt_tokens=length,
        # Unlike Python's max, numpy's keeps a NaN.
        error=float(np.max(list(map(_difference, found, expected)))),
        tolerance=max(TOLERANCES[adapter.loaded.dtype], TOLERANCES[layout.dtype]),
        passed_windows=all(length > window for window in windows),
    )


def _paged_logits(
    adapter: ModelAdapter,
    store: KVStore,
    table: np.ndarray,
    token_ids: np.ndarray,
    start: int,
) -> mx.array:
    """Run one sequence's tokens [start, start + len) and return the last one's logits."""
    block_size = adapter.layout.block_size
    end = start + len(token_ids)
    positions = np.arange(start, end, dtype=np.int32)
    used = table[: -(-end // block_size)]
    group = GroupArrays(
        slot_mapping=used[positions // block_size].astype(np.int64) * block_size
        + positions % block_size,
        block_tables=used[None],
        copy_src=np.empty(0, np.int32),
        copy_dst=np.empty(0, np.int32),
    )
    host = BatchArrays(
        sequences=(),
        num_decodes=int(len(token_ids) == 1),
        token_ids=token_ids.astype(np.int32),
        positions=positions,
        query_start_loc=np.array([0, len(token_ids)], np.int32),
        context_lens=np.array([end], np.int32),
        sample_rows=np.array([len(token_ids) - 1], np.int32),
        sample_sequences=(),
        groups=(group,) * len(adapter.layout.groups),
    )
    logits = adapter.forward(upload(host), store)[0]
    store.submit(logits)
    return logits


def _difference(logits: mx.array, expected: mx.array) -> float:
    """Largest difference as a share of the largest expected logit; NaN stays NaN."""
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    largest = mx.maximum(mx.max(mx.abs(expected)), 1e-6)
    share: Any = (mx.max(mx.abs(logits - expected)) / largest).item()
    return float(share)


def warm_up(adapter: ModelAdapter, writer: PoolWriter, context_len: int) -> None:
    """Decode one token after a context of that length, so that what it needs is compiled.

    The context is one block many times over, which costs no memory.

    Args:
        adapter: Of the model to be served.
        writer: How the pool will be written.
        context_len: Tokens, the decoded one included.
    """
    layout = adapter.layout
    store = KVStore(layout, (2,) * len(layout.groups), writer=writer)
    table = np.zeros(-(-context_len // layout.block_size), dtype=np.int32)
    table[-1] = 1
    mx.eval(_paged_logits(adapter, store, table, np.zeros(1, np.int32), context_len - 1))


def run_dummy_chunk(adapter: ModelAdapter, num_rows: int, writer: PoolWriter | None = None) -> None:
    """Compute one chunk of a prompt in a pool just large enough, to see what it costs.

    Args:
        adapter: Of the model to be served.
        num_rows: Tokens in the chunk.
        writer: How the pool will be written; by functional update if None.
    """
    layout = adapter.layout
    num_blocks = -(-num_rows // layout.block_size)
    store = KVStore(layout, (num_blocks,) * len(layout.groups), writer=writer)
    table = np.arange(num_blocks, dtype=np.int32)
    mx.eval(_paged_logits(adapter, store, table, np.zeros(num_rows, np.int32), 0))
