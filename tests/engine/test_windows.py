"""Blocks that a sliding window has passed go back to the pool, and nothing else changes by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from pagedmlx import LLM, SamplingParams
from pagedmlx.core.kv_manager import KVManager
from tests.support.tiny_models import CONFIGS, VOCAB_SIZE, WINDOW, build_model, save_tiny_folder

NUM_TOKENS = 20
CHUNK = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
FORKED = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, n=3)


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    shared = rng.integers(6, VOCAB_SIZE, 90).tolist()
    lengths = (1, WINDOW, WINDOW + 1, 47, 130)
    prompts = [rng.integers(6, VOCAB_SIZE, length).tolist() for length in lengths]
    return [*prompts, *(shared[:n] + rng.integers(6, VOCAB_SIZE, n).tolist() for n in (90, 70, 9))]


PROMPTS = make_prompts()


@pytest.fixture(scope="module", params=["gemma3_text", "gpt_oss"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[tuple[int, ...]]]:
    """A model's folder and the tokens that mlx-lm makes of every prompt."""
    folder = save_tiny_folder(tmp_path_factory.mktemp("model"), request.param)
    own = build_model(CONFIGS[request.param])
    expected = [
        tuple(
            int(token) for token, _ in generate_step(mx.array(prompt), own, max_tokens=NUM_TOKENS)
        )
        for prompt in PROMPTS
    ]
    return folder, expected


def open_llm(folder: Path, **settings: Any) -> LLM:
    small = {
        "block_size": 8,
        "prefill_chunk_size": CHUNK,
        "pool_fill": float("nan"),
        "check_integrity": True,
    }
    return LLM(str(folder), **{**small, **settings})


def kv_of(llm: LLM) -> KVManager:
    return llm._worker.engine._scheduler.kv


def test_answers_are_mlx_lms_and_no_more_is_held_than_the_window_needs(
    model: tuple[Path, list[tuple[int, ...]]],
) -> None:
    folder, expected = model
    with open_llm(folder, num_blocks=400, enable_prefix_caching=False) as llm:
        kv = kv_of(llm)
        windowed = kv._windows.passing[0]
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            kv.pools[windowed].peak_used_blocks = 0
            (output,) = llm.generate(prompt, GREEDY)
            assert output.outputs[0].token_ids == tokens
            most = kv._windows.num_held(windowed, 1000)
            assert most * 8 <= WINDOW + 2 * CHUNK + 16
            assert kv.pools[windowed].peak_used_blocks <= most
        whole = kv.num_blocks_for(len(PROMPTS[-3]) + NUM_TOKENS - 1)
        assert kv.pools[1 - windowed].peak_used_blocks >= whole > most


def test_hits_forks_and_preemptions_give_the_same(
    model: tuple[Path, list[tuple[int, ...]]],
) -> None:
    folder, expected = model
    with open_llm(folder, num_blocks=400) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY)
            assert [each.outputs[0].token_ids for each in outputs] == expected
        # The whole blocks of what was asked before, windowed layers included.
        assert outputs[5].num_cached_tokens >= (len(PROMPTS[5]) - 1) // 8 * 8 > WINDOW
        for output, tokens in zip(llm.generate(PROMPTS, FORKED), expected, strict=True):
            assert [each.token_ids for each in output.outputs] == [tokens] * 3
    with open_llm(folder, num_blocks=26) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [each.outputs[0].token_ids for each in outputs] == expected
    with open_llm(folder, num_blocks=24, enable_prefix_caching=False) as llm:
        outputs = llm.generate([PROMPTS[3]] * 6, GREEDY)
        assert [each.outputs[0].token_ids for each in outputs] == [expected[3]] * 6
        assert llm.stats().num_preemptions > 0


def test_the_same_bytes_hold_longer_texts(model: tuple[Path, list[tuple[int, ...]]]) -> None:
    folder, expected = model
    with open_llm(folder, num_blocks=400) as llm:
        given = llm.stats().pool_bytes
    with open_llm(folder, kv_cache_memory=given) as llm:
        sizes = [pool.num_blocks for pool in kv_of(llm).pools]
        assert max(sizes) > 500
        assert llm.stats().pool_bytes <= given
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [each.outputs[0].token_ids for each in outputs] == expected
