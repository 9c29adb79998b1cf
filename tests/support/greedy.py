"""Greedy tokens of a small model in every way that the engine can run it, against mlx-lm's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from pagedmlx.config import EngineConfig
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.engine.build import build_engine
from pagedmlx.engine.engine import Engine
from pagedmlx.engine.outputs import Job
from pagedmlx.models.loader import LoadedModel
from pagedmlx.progress import ignore_progress
from tests.support.engines import assert_idle, run_jobs
from tests.support.tokenizers import byte_tokenizer

NUM_TOKENS = 8
LENGTHS = (1, 4, 17, 30, 41)
NUM_FORKS = 3


@dataclass(frozen=True, slots=True)
class Runs:
    """What came of running one model.

    Attributes:
        equal: For each way to run it, whether all its tokens were mlx-lm's.
        num_preemptions: In all.
        num_cached_tokens: In the runs without forks; the longest prompt also runs twice alone.
        notes: What the engine said at load.
    """

    equal: dict[str, bool]
    num_preemptions: int
    num_cached_tokens: int
    notes: tuple[str, ...]


def make_prompts(vocab_size: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Random prompts, always the same."""
    rng = np.random.default_rng(7)
    return [rng.integers(3, vocab_size, length).tolist() for length in lengths]


def expected_tokens(model: Any, prompt: Sequence[int], count: int = NUM_TOKENS) -> list[int]:
    """mlx-lm's own greedy tokens: the prompt in one pass, then one token at a time."""
    caches = make_prompt_cache(model)
    inputs, tokens = list(prompt), []
    for _ in range(count):
        logits = model(mx.array([inputs]), cache=caches)[0, -1]
        inputs = [int(mx.argmax(logits).item())]
        tokens += inputs
    return tokens


def run_every_way(loaded: LoadedModel, vocab_size: int, depth: int = 0) -> Runs:
    """Run prompts of many lengths beside each other over a small pool full of NaN.

    Blocks of 4 tokens, prompts in chunks of 7, and too few blocks for all. Everything runs twice,
    then the longest prompt by itself, the second time from the prefix cache where there is one,
    then everything as outputs that fork from one prompt. Afterwards this thread is done with MLX.

    Args:
        loaded: The model, loaded on this thread.
        vocab_size: Token ids in prompts are below this.
        depth: Steps that are dispatched ahead, as where the pool is updated in place.
    """
    prompts = make_prompts(vocab_size)
    expected = [expected_tokens(loaded.model, prompt) for prompt in prompts]
    forked = [tokens for tokens in expected for _ in range(NUM_FORKS)]
    engine = _engine(loaded, num_blocks=-(-(max(LENGTHS) + NUM_TOKENS) // 4) + 3)
    engine._runner.depth = depth
    try:
        equal = {
            "batch": _run(engine, prompts) == expected,
            "again": _run(engine, prompts) == expected,
            "alone": all(_run(engine, prompts[-1:]) == expected[-1:] for _ in range(2)),
        }
        num_cached_tokens = engine.stats().num_cached_tokens
        _abort_midway(engine, prompts)
        equal["forks"] = _run(engine, prompts, NUM_FORKS) == forked
        assert_idle(engine)
        assert len(engine._runner._store.states) == 0
        return Runs(equal, engine.stats().num_preemptions, num_cached_tokens, engine.notes)
    finally:
        engine.close()


def _engine(loaded: LoadedModel, num_blocks: int) -> Engine:
    config = EngineConfig(
        block_size=4,
        num_blocks=num_blocks,
        prefill_chunk_size=7,
        max_num_batched_tokens=24,
        max_model_len=256,
        pool_fill=float("nan"),
        check_integrity=True,
    )
    return build_engine(loaded, byte_tokenizer(), config, on_progress=ignore_progress)


def _abort_midway(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Start everything with forks, and end it while prompts and outputs are under way."""
    params = SamplingParams(n=NUM_FORKS, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    ids = [
        engine.add_request(Job(prompt_token_ids=prompt, sampling_params=params))
        for prompt in prompts
    ]
    for _ in range(4):
        engine.step()
    for request_id in ids:
        engine.abort(request_id)


def _run(engine: Engine, prompts: Sequence[Sequence[int]], n: int = 1) -> list[list[int]]:
    params = SamplingParams(n=n, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = run_jobs(engine, [Job(prompt_token_ids=p, sampling_params=params) for p in prompts])
    return [list(each.token_ids) for output in outputs for each in output.outputs]
