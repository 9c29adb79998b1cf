"""GGUF files of every architecture answer as mlx-lm answers from a folder of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.rope_utils import Llama3RoPE
from mlx_lm.utils import load_model as mlx_lm_load

from pagedmlx import LLM, SamplingParams
from pagedmlx.errors import ModelLoadError, UnsupportedModelError
from pagedmlx.models.loader import load_model
from tests.support.gguf_convert import convert_folder
from tests.support.gguf_writer import STRING, UINT32, encode_tensor
from tests.support.tiny_models import save_tiny_folder

NUM_TOKENS = 12
FOLDERS = ["llama_tied", "qwen2", "qwen3"]
QUESTION = [{"role": "user", "content": "What is 123 and 4567?"}]
MIXED = {
    "token_embd": "Q8_0",
    "output": "Q4_1",
    "attn_q": "Q4_0",
    "attn_k": "Q4_1",
    "attn_v": "Q8_0",
    "attn_output": "BF16",
    "attn_norm": "F16",
    "ffn_up": "F16",
}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def greedy_tokens(folder: Path, prompt: tuple[int, ...]) -> list[int]:
    model, _ = mlx_lm_load(folder)
    steps = generate_step(mx.array(prompt), model, max_tokens=NUM_TOKENS)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("types", [{}, MIXED, dict.fromkeys(MIXED, "BF16")])
@pytest.mark.parametrize("name", FOLDERS)
def test_greedy_tokens_are_those_of_mlx_lm_on_the_same_weights(
    tmp_path: Path, name: str, types: dict[str, str]
) -> None:
    folder = save_tiny_folder(tmp_path / name, name)
    path = convert_folder(folder, types).write(tmp_path / f"{name}.gguf")
    with LLM(path, num_blocks=16) as llm:
        (output,) = llm.chat(QUESTION, GREEDY)
    assert list(output.outputs[0].token_ids) == greedy_tokens(folder, output.prompt_token_ids)


@pytest.mark.parametrize("name", FOLDERS)
def test_tokenizer_template_and_ends_are_those_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = save_tiny_folder(tmp_path / name, name)
    file = convert_folder(folder)
    file.metadata["tokenizer.ggml.eot_token_id"] = (UINT32, 2)
    file.metadata["tokenizer.ggml.eom_token_id"] = (UINT32, 5)
    path = file.write(tmp_path / "m.gguf")
    prompts = []
    for source in (folder, path):
        with LLM(source, num_blocks=16) as llm:
            params = SamplingParams(max_tokens=1)
            prompts.append(llm.chat(QUESTION, params)[0].prompt_token_ids)
            prompts.append(llm.generate("né 🙂 12", params)[0].prompt_token_ids)
    assert prompts[:2] == prompts[2:]
    assert load_model(path).eos_token_ids == {1, 2, 5}


@pytest.mark.parametrize("name", FOLDERS)
def test_rope_pairs_lie_side_by_side_in_llama_files_only(tmp_path: Path, name: str) -> None:
    folder = save_tiny_folder(tmp_path / name, name)
    path = convert_folder(folder).write(tmp_path / "m.gguf")
    model: Any = load_model(path).model
    assert model.layers[0].self_attn.rope.traditional == (name == "llama_tied")


def test_the_rope_factors_of_llama_3_are_honoured(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "llama", "llama_tied")
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = json.loads((folder / "config.json").read_text()) | {"rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    plain = 10000.0 ** (np.arange(0, 8, 2) / 8)
    periods = np.array(Llama3RoPE(8, base=10000.0, scaling_config=scaling)._freqs)
    assert not np.allclose(periods, plain)
    file = convert_folder(folder)
    raw, _ = encode_tensor("F32", periods / plain)
    file.tensors["rope_freqs.weight"] = ("F32", (4,), raw)
    with LLM(file.write(tmp_path / "m.gguf"), num_blocks=16) as llm:
        (output,) = llm.chat(QUESTION, GREEDY)
    assert list(output.outputs[0].token_ids) == greedy_tokens(folder, output.prompt_token_ids)
    file.tensors["rope_freqs.weight"] = ("F32", (8,), raw * 2)
    with pytest.raises(ModelLoadError, match="rope_freqs"):
        load_model(file.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("qwen2", "qwen2.attention.key_length", (UINT32, 16), "the head size 8"),
        ("qwen3", "qwen3.rope.scaling.type", (STRING, "yarn"), "'yarn'"),
        ("qwen3", "qwen3.expert_count", (UINT32, 8), "mixture of experts"),
    ],
)
def test_what_mlx_lm_has_no_place_for_is_refused_by_name(
    tmp_path: Path, name: str, key: str, value: tuple[int, Any], words: str
) -> None:
    file = convert_folder(save_tiny_folder(tmp_path / name, name))
    file.metadata[key] = value
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        load_model(file.write(tmp_path / "m.gguf"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["blk.1.attn_q.bias", "blk.2.attn_k_norm.weight"])
def test_a_tensor_of_the_architecture_that_is_missing_is_named(
    tmp_path: Path, missing: str
) -> None:
    name = "qwen2" if missing.endswith("bias") else "qwen3"
    file = convert_folder(save_tiny_folder(tmp_path / name, name))
    del file.tensors[missing]
    with pytest.raises(ModelLoadError, match=missing.replace(".", r"\.")):
        load_model(file.write(tmp_path / "m.gguf"))
