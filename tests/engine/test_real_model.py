"""The whole path over tiny models with random weights, compared with mlx-lm's own generation."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import base, llama

from pagedmlx import LLM, SamplingParams
from pagedmlx.core.step import Step
from pagedmlx.engine import memory
from pagedmlx.engine.runner import ModelRunner
from pagedmlx.errors import EngineDeadError, InvalidRequestError, UnsupportedModelError
from pagedmlx.models import probe
from tests.support import tiny_models
from tests.support.tiny_models import CONFIGS, VOCAB_SIZE, build_model, save_tiny_folder

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
MIB = 2**20


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(4)
    shared = rng.integers(6, VOCAB_SIZE, 40).tolist()
    lengths = (1, 2, 7, 8, 9, 15, 16, 17, 31, 60)
    prompts = [rng.integers(6, VOCAB_SIZE, length).tolist() for length in lengths]
    return [*prompts, *(shared + rng.integers(6, VOCAB_SIZE, n).tolist() for n in (1, 5, 16))]


PROMPTS = make_prompts()
Model = tuple[Path, list[tuple[int, ...]]]


@pytest.fixture(scope="module", params=["llama", "llama_window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model's folder and the tokens that mlx-lm makes of every prompt."""
    folder = save_tiny_folder(tmp_path_factory.mktemp("model"), request.param)
    own = build_model(CONFIGS[request.param])
    expected = [
        tuple(
            int(token) for token, _ in generate_step(mx.array(prompt), own, max_tokens=NUM_TOKENS)
        )
        for prompt in PROMPTS
    ]
    assert len(set(expected)) == len(PROMPTS)
    return folder, expected


def open_llm(folder: Path, **settings: Any) -> LLM:
    """Small blocks, and NaN wherever no token has been."""
    small = {"block_size": 8, "num_blocks": 400, "pool_fill": float("nan"), "check_integrity": True}
    return LLM(str(folder), **{**small, **settings})


def tokens_of(llm: LLM, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def test_greedy_tokens_equal_mlx_lms_alone_in_a_batch_and_from_the_cache(model: Model):
    folder, expected = model
    with open_llm(folder) as llm:
        alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
        assert alone == expected
        cached = llm.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in cached] == expected
        assert sum(output.num_cached_tokens for output in cached) > 0
    with open_llm(folder, enable_prefix_caching=False) as llm:
        assert tokens_of(llm) == expected
        assert llm.stats().num_cached_tokens == 0


def test_greedy_tokens_equal_mlx_lms_in_forks(model: Model):
    folder, expected = model
    params = SamplingParams(n=3, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with open_llm(folder) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert llm.stats().num_copies > 0
    for output, tokens in zip(outputs, expected, strict=True):
        assert [each.token_ids for each in output.outputs] == [tokens] * 3


def test_greedy_tokens_equal_mlx_lms_with_preemption(model: Model):
    folder, expected = model
    with open_llm(folder, num_blocks=16) as llm:
        assert tokens_of(llm) == expected
        stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.num_evictions > 0
    assert stats.peak_used_blocks <= 16


@pytest.mark.parametrize("backend", ["gather", "reference"])
def test_greedy_tokens_equal_mlx_lms_with_chunked_prompts(model: Model, backend: str):
    folder, expected = model
    settings = {"prefill_chunk_size": 7, "max_num_batched_tokens": 16, "max_num_seqs": 5}
    with open_llm(folder, attention_backend=backend, **settings) as llm:
        assert tokens_of(llm) == expected


def test_seeded_tokens_do_not_depend_on_company_or_preemption(model: Model):
    folder, _ = model
    params = [
        SamplingParams(temperature=1.0, seed=number, n=1 + number % 2, top_p=0.9, max_tokens=16)
        for number in range(len(PROMPTS))
    ]
    with open_llm(folder, enable_prefix_caching=False) as llm:
        alone = [llm.generate(p, each)[0].outputs for p, each in zip(PROMPTS, params, strict=True)]
    with open_llm(folder, num_blocks=16, prefill_chunk_size=7) as llm:
        together = [output.outputs for output in llm.generate(PROMPTS, params)]
        assert llm.stats().num_preemptions > 0
    assert together == alone


# Memory. All numbers are MLX's own.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_folder(tmp_path / "model")


@pytest.fixture
def active_before() -> Iterator[int]:
    """Active memory before the test; whatever it did, all must be given back afterwards."""
    gc.collect()
    before = mx.get_active_memory()
    yield before
    gc.collect()
    assert mx.get_active_memory() - before < MIB


def test_decoding_with_copies_on_write_never_copies_the_pool(
    folder: Path, active_before: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "NUM_SLABS", 1)
    with LLM(str(folder), num_blocks=16384, block_size=16) as llm:
        pool_array_bytes = llm.stats().pool_bytes // 8  # K and V of four layers
        assert pool_array_bytes == 16 * MIB
        forked = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=24, ignore_eos=True)
        llm.generate(PROMPTS[-1], forked)
        before = llm.stats()
        mx.reset_peak_memory()
        active = mx.get_active_memory()
        for number in range(10):
            llm.generate([number + 6] * 20, forked)
        after = llm.stats()
        assert mx.get_peak_memory() - active < pool_array_bytes // 4
    assert after.num_steps - before.num_steps >= 200
    assert after.num_copies - before.num_copies >= 10


def test_a_long_prompt_never_builds_logits_for_all_positions(
    tmp_path: Path, active_before: int, monkeypatch: pytest.MonkeyPatch
):
    vocab_size, num_tokens = 32768, 4000
    wide = {**CONFIGS["llama"], "vocab_size": vocab_size, "max_position_embeddings": 8192}
    monkeypatch.setattr(tiny_models, "CONFIGS", {**CONFIGS, "wide": wide})
    path = save_tiny_folder(tmp_path / "wide", "wide", max_model_len=8192)
    prompt = (np.arange(num_tokens) % 300 + 6).tolist()
    with LLM(str(path), num_blocks=300, prefill_chunk_size=256) as llm:
        mx.reset_peak_memory()
        active = mx.get_active_memory()
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=2))
        grown = mx.get_peak_memory() - active
    assert len(output.prompt_token_ids) == num_tokens
    # Not even those of one chunk.
    assert grown < vocab_size * 256 * 4


def test_closing_gives_the_memory_back(folder: Path, active_before: int):
    llm = LLM(str(folder), num_blocks=4096)
    llm.generate(PROMPTS, GREEDY)
    assert mx.get_active_memory() - active_before > 15 * MIB
    llm.close()
    assert mx.get_active_memory() - active_before < MIB


def test_forgetting_gives_the_memory_back(folder: Path, active_before: int):
    llm = LLM(str(folder), num_blocks=4096)
    del llm
    gc.collect()
    assert mx.get_active_memory() - active_before < MIB


def test_a_loop_that_failed_gives_the_memory_back(
    folder: Path, active_before: int, monkeypatch: pytest.MonkeyPatch
):
    llm = LLM(str(folder), num_blocks=4096)
    dispatch = ModelRunner.dispatch

    def fail_late(self: ModelRunner, step: Step) -> None:
        if step.step_id == 5:
            raise RuntimeError("the device is gone")
        dispatch(self, step)

    monkeypatch.setattr(ModelRunner, "dispatch", fail_late)
    with pytest.raises(EngineDeadError) as caught:
        llm.generate(PROMPTS, GREEDY)
    llm.close()
    assert mx.get_active_memory() - active_before < MIB
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("fault", ["probe", "pool", "context"])
def test_a_load_that_fails_leaves_neither_memory_nor_hook(
    folder: Path, active_before: int, fault: str, monkeypatch: pytest.MonkeyPatch
):
    settings: dict[str, Any] = {
        "probe": {"num_blocks": 64},
        "pool": {"num_blocks": 10**12},
        "context": {"num_blocks": 64, "max_model_len": 10**6},
    }[fault]
    error = UnsupportedModelError if fault == "probe" else InvalidRequestError
    with monkeypatch.context() as patch:
        if fault == "probe":
            patch.setattr(probe, "TOLERANCES", {"float32": -1.0})
        with pytest.raises(error) as caught:
            LLM(str(folder), **settings)
    assert "\n" not in str(caught.value)
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
    gc.collect()
    assert mx.get_active_memory() - active_before < MIB
    with LLM(str(folder), num_blocks=64) as llm:
        assert llama.scaled_dot_product_attention is not base.scaled_dot_product_attention
        assert llm.generate("hello", GREEDY)[0].finished
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
    assert "pagedmlx-engine" not in [thread.name for thread in threading.enumerate()]
