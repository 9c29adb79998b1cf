"""Compares a model over the paged cache with the same model over mlx-lm's own, at load."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from pagedmlx.errors import ModelLoadError, UnsupportedModelError, first_line
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import PoolWriter
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.dummy_steps import DummySequence, Tokens, made_up_tokens, run_step

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
    prompts = [
        made_up_tokens(adapter, length, 13),
        made_up_tokens(adapter, block_size // 2 + 1, 5),
    ]
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

    probes = [DummySequence(index, table) for index, table in enumerate(tables)]
    chunk = block_size + 1
    run_step(adapter, store, [(probes[0], prompts[0][:chunk])])
    steps = [run_step(adapter, store, [(probes[0], prompts[0][chunk:]), (probes[1], prompts[1])])]
    last = (length - 1) // block_size
    source, tables[0][last] = tables[0][last], 0
    for group in range(len(layout.groups)):
        store.copy_blocks(group, np.array([source], np.int32), np.array([0], np.int32))
    for pair in zip(*tokens, strict=True):
        parts = [(probe, np.array([token])) for probe, token in zip(probes, pair, strict=True)]
        steps.append(run_step(adapter, store, parts, _NUM_PADDING))

    found = [logits[index] for index in range(len(probes)) for logits in steps]
    return ProbeResult(
        num_prompt_tokens=length,
        # Unlike Python's max, numpy's keeps a NaN.
        error=float(np.max(list(map(_difference, found, expected)))),
        tolerance=max(TOLERANCES[adapter.loaded.dtype], TOLERANCES[layout.dtype]),
        passed_windows=all(length > window for window in windows),
    )


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


def _difference(logits: mx.array, expected: mx.array) -> float:
    """Largest difference as a share of the largest expected logit; NaN stays NaN."""
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    largest = mx.maximum(mx.max(mx.abs(expected)), 1e-6)
    share: Any = (mx.max(mx.abs(logits - expected)) / largest).item()
    return float(share)
