"""Quantised folders give the logits that mlx-lm gives, expanded on the CPU or packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model as mlx_lm_load
from mlx_lm.utils import quantize_model

from pagedmlx import LLM, SamplingParams
from pagedmlx.models.loader import load_model
from tests.support.tiny_models import CONFIGS, build_model, save_tiny_folder

# Rows of 64 can be cut into groups of every mode.
_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
_BASE = CONFIGS["llama"]
_CONFIGS = {
    **CONFIGS,
    "deepseek_v3": {
        **_BASE,
        "model_type": "deepseek_v3",
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": None,
    },
}

Predicate = Callable[[str, nn.Module], bool | dict[str, Any]]


def quantised_folder(
    path: Path,
    name: str = "llama",
    *,
    bits: int = 4,
    mode: str = "affine",
    predicate: Predicate | None = None,
    global_scale: bool = False,
) -> Path:
    """What ``mlx_lm.convert --quantize`` writes for a tiny model, with tokenizer and template."""
    group_size = {"affine": 32, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}[mode]
    config = {**_CONFIGS[name], **_SIZES, "num_attention_heads": 8}
    save_tiny_folder(path)
    model, written = quantize_model(
        build_model(config),
        dict(config),
        group_size,
        bits,
        mode=mode,
        quant_predicate=predicate,
        global_scale=global_scale,
    )
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(written))
    return path


def logits_of(model: Any) -> np.ndarray:
    return np.array(model(mx.arange(20)[None])[0].astype(mx.float32))


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def check_against_mlx_lm(folder: Path) -> None:
    expected = logits_of(mlx_lm_load(folder)[0])
    expanded = load_model(folder)
    assert {array.dtype for _, array in tree_flatten(expanded.model.parameters())} == {mx.float32}
    assert distance(logits_of(expanded.model), expected) < 1e-5
    packed = load_model(folder, dtype="float16")
    assert packed.parameter_bytes < expanded.parameter_bytes
    assert distance(logits_of(packed.model), expected) < 3e-2


@pytest.mark.parametrize(
    ("bits", "mode"),
    [*((bits, "affine") for bits in (2, 3, 4, 5, 6, 8)), (4, "mxfp4"), (8, "mxfp8"), (4, "nvfp4")],
)
def test_every_kind_of_quantisation_gives_mlx_lms_logits(
    tmp_path: Path, bits: int, mode: str
) -> None:
    check_against_mlx_lm(quantised_folder(tmp_path / "model", bits=bits, mode=mode))


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_biases_experts_and_latent_attention_are_expanded_too(
    tmp_path: Path, name: str, mode: str
) -> None:
    check_against_mlx_lm(quantised_folder(tmp_path / "model", name, mode=mode))


def test_experts_with_a_scale_each_are_expanded_with_it(tmp_path: Path) -> None:
    folder = quantised_folder(tmp_path / "model", "qwen3_moe", mode="nvfp4", global_scale=True)
    config = json.loads((folder / "config.json").read_text())
    original: Any = build_model({**config, "quantization": None})
    expanded: Any = load_model(folder).model
    for left, right in zip(expanded.layers, original.layers, strict=True):
        # MLX itself multiplies such experts on a GPU only.
        weights = [np.array(each.mlp.switch_mlp.up_proj.weight) for each in (left, right)]
        assert distance(*weights) < 0.15


def test_layers_may_differ_in_bits_and_some_may_be_plain(tmp_path: Path) -> None:
    def predicate(path: str, _: nn.Module) -> bool | dict[str, Any]:
        if "lm_head" in path or "embed" in path:
            return {"group_size": 64, "bits": 6}
        return "o_proj" not in path and {"group_size": 32, "bits": 3 if "mlp" in path else 8}

    folder = quantised_folder(tmp_path / "model", predicate=predicate)
    check_against_mlx_lm(folder)
    model: Any = load_model(folder, dtype="float16").model
    assert (model.lm_head.bits, model.layers[0].mlp.up_proj.bits) == (6, 3)
    assert isinstance(model.layers[0].self_attn.o_proj, nn.Linear)


def test_a_quantised_folder_answers_as_mlx_lm_does(tmp_path: Path) -> None:
    folder = quantised_folder(tmp_path / "model", "qwen3")
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with LLM(folder, num_blocks=16) as llm:
        (output,) = llm.chat([{"role": "user", "content": "Hello there"}], params)
    steps = generate_step(
        mx.array(output.prompt_token_ids), mlx_lm_load(folder)[0], max_tokens=params.max_tokens
    )
    assert list(output.outputs[0].token_ids) == [int(token) for token, _ in steps]
