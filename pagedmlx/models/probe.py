"""Compares a model over the paged cache with the same model over mlx-lm's own, at load."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from pagedmlx.core.batch import NO_BLOCK, batch_of
from pagedmlx.core.request import Request
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.sequence import Sequence
from pagedmlx.errors import ModelLoadError, UnsupportedModelError, first_line
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import PoolWriter
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.ops.base import PagedBatch

Tokens = npt.NDArray[np.integer[Any]]

NUM_DECODES = 3
_NUM_PADDING = 2
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
    """Run two short prompts, a copy on write and three decode steps, both ways.

    The longer prompt comes in two chunks, the second one beside the other prompt.

    Uses a small pool of its own, on the backend that will serve. The decode steps follow each
    other as in serving: where the pool allows it, none waits for the one before.

    Args:
        adapter: Of the model to be served.
        writer: How the pool will be written; by functional update if None.

    Raises:
        ModelLoadError: Already mlx-lm's own logits are not finite.
        UnsupportedModelError: The model fails on the way, or its logits differ by more than the
            types explain.
    """
    model_type = adapter.loaded.model_type
    try:
        result = _measure(adapter, writer)
    except _NotFiniteError as error:
        raise ModelLoadError(
            f"{model_type}: the model's own logits are not finite numbers",
            hint="its weights or its config are damaged, or want a --dtype of a larger range",
        ) from error
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


class _NotFiniteError(Exception):
    """mlx-lm's own logits can't be compared with."""


def _measure(adapter: ModelAdapter, writer: PoolWriter | None) -> ProbeResult:
    layout = adapter.layout
    block_size = layout.block_size
    windows = [group.window for group in layout.groups if group.window is not None]
    length = max(2 * block_size, min(max(windows, default=0), MAX_PROMPT_TOKENS)) + 1
    # The last block must be partly filled, so that copying it matters.
    length += length % block_size == 0
    prompts = [_prompt(adapter, length, 13), _prompt(adapter, block_size // 2 + 1, 5)]
    ends = np.cumsum([0, *(-(-(len(each) + NUM_DECODES) // block_size) for each in prompts)])
    store = KVStore(layout, (int(ends[-1]) + 1,) * len(layout.groups), float("nan"), writer)
    # Block ids run backwards, so that order in the pool is not order in the sequence; 0 is spare.
    tables = [
        np.arange(end, start, -1, dtype=np.int32)
        for start, end in itertools.pairwise(ends.tolist())
    ]
    expected: list[mx.array] = []
    tokens: list[list[int]] = []
    for prompt in prompts:
        logits, chosen = _expected(adapter, prompt)
        expected += logits
        tokens.append(chosen)
    if not all(mx.isfinite(logits).all().item() for logits in expected):
        raise _NotFiniteError

    probes = [_Probe(index, table) for index, table in enumerate(tables)]
    chunk = block_size + 1
    _step(adapter, store, [(probes[0], prompts[0][:chunk])])
    steps = [_step(adapter, store, [(probes[0], prompts[0][chunk:]), (probes[1], prompts[1])])]
    last = (length - 1) // block_size
    source, tables[0][last] = tables[0][last], 0
    for group in range(len(layout.groups)):
        store.copy_blocks(group, np.array([source], np.int32), np.array([0], np.int32))
    for pair in zip(*tokens, strict=True):
        parts = [(probe, np.array([token])) for probe, token in zip(probes, pair, strict=True)]
        steps.append(_step(adapter, store, parts))

    found = [logits[index] for index in range(len(probes)) for logits in steps]
    return ProbeResult(
        num_prompt_tokens=length,
        # Unlike Python's max, numpy's keeps a NaN.
        error=float(np.max(list(map(_difference, found, expected)))),
        tolerance=max(TOLERANCES[adapter.loaded.dtype], TOLERANCES[layout.dtype]),
        passed_windows=all(length > window for window in windows),
    )


def _prompt(adapter: ModelAdapter, length: int, first: int) -> Tokens:
    return (np.arange(length) * 7919 + first) % adapter.vocab_size


def _expected(adapter: ModelAdapter, prompt: Tokens) -> tuple[list[mx.array], list[int]]:
    """mlx-lm's logits after a prompt and after each of its next tokens, and those tokens."""
    caches = make_prompt_cache(adapter.loaded.model)
    logits = [adapter.last_logits(mx.array(prompt.astype(np.int32)), caches)]
    tokens: list[int] = []
    for _ in range(NUM_DECODES):
        token: Any = mx.argmax(logits[-1]).item()
        tokens.append(token)
        logits.append(adapter.last_logits(mx.array(tokens[-1:]), caches))
    return logits, tokens


class _Probe:
    """A sequence that no scheduler knows of.

    Args:
        seq_id: Its id.
        table: Its blocks in every group.

    Attributes:
        start: Tokens that are there already.
    """

    def __init__(self, seq_id: int, table: Tokens) -> None:
        request = Request(f"probe {seq_id}", (0,), SamplingParams())
        self.sequence = Sequence(seq_id, request, 0, [], ())
        self.table = table
        self.start = 0


def _step(adapter: ModelAdapter, store: KVStore, parts: list[tuple[_Probe, Tokens]]) -> mx.array:
    """Run the next tokens of some sequences; logits (S or more, vocab_size) of the last of each.

    Args:
        adapter: The model.
        store: The pool.
        parts: Sequences with their tokens, those with a single one first or none of them.

    Returns:
        Steps that decode have padding where they may, whose logits are the last.
    """
    spans = [(probe.start, len(tokens)) for probe, tokens in parts]
    widths = [-(-sum(span) // adapter.layout.block_size) for span in spans]
    table = np.full((len(parts), max(widths)), NO_BLOCK, np.int32)
    for row, (probe, _), width in zip(table, parts, widths, strict=True):
        row[:width] = probe.table[:width]
    host = batch_of(
        spans,
        [table] * len(adapter.layout.groups),
        adapter.layout.block_size,
        token_ids=np.concatenate([tokens for _, tokens in parts]).astype(np.int32),
        sequences=tuple(probe.sequence for probe, _ in parts),
    )
    is_padded = host.only_decodes and adapter.takes_padding(store)
    logits = adapter.forward(PagedBatch(host, _NUM_PADDING if is_padded else 0), store)
    store.submit(logits)
    for probe, tokens in parts:
        probe.start += len(tokens)
    return logits


def _difference(logits: mx.array, expected: mx.array) -> float:
    """Largest difference as a share of the largest expected logit; NaN stays NaN."""
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    largest = mx.maximum(mx.max(mx.abs(expected)), 1e-6)
    share: Any = (mx.max(mx.abs(logits - expected)) / largest).item()
    return float(share)


def run_dummy_chunk(adapter: ModelAdapter, num_rows: int, writer: PoolWriter | None = None) -> None:
    """Compute one chunk of a prompt in a pool just large enough, to see what it costs.

    Args:
        adapter: Of the model to be served.
        num_rows: Tokens in the chunk.
        writer: How the pool will be written; by functional update if None.
    """
    run_chunk(adapter, num_rows, make_dummy_pool(adapter, num_rows, writer))


def make_dummy_pool(
    adapter: ModelAdapter, num_rows: int, writer: PoolWriter | None = None
) -> KVStore:
    """A pool that just holds so many tokens, as in ``run_dummy_chunk``."""
    num_blocks = -(-num_rows // adapter.layout.block_size)
    return KVStore(adapter.layout, (num_blocks,) * len(adapter.layout.groups), writer=writer)


def run_chunk(adapter: ModelAdapter, num_rows: int, store: KVStore) -> None:
    """Compute the beginning of a prompt, and wait for it; the pool may have been used so before."""
    table = np.arange(-(-num_rows // adapter.layout.block_size), dtype=np.int32)
    mx.eval(_step(adapter, store, [(_Probe(0, table), np.zeros(num_rows, np.int32))]))
