"""Tiny models with random weights, built from mlx-lm's own classes, and folders made of them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagedmlx.models.loader import LoadedModel
from tests.support.model_zoo import VOCAB_SIZE, WINDOW, zoo_config

END_OF_TURN = "<|end|>"

_BASE: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 24,
}
_WINDOW_TYPES = ["sliding_attention", "full_attention"] * 2

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_BASE, "model_type": "llama", "rope_traditional": True},
    "llama_tied": {**_BASE, "model_type": "llama", "tie_word_embeddings": True},
    "llama_window": {
        **_BASE,
        "model_type": "llama",
        "layer_types": _WINDOW_TYPES,
        "sliding_window": WINDOW,
    },
    "qwen2": {**_BASE, "model_type": "qwen2"},
    "qwen3": {**_BASE, "model_type": "qwen3"},
    "qwen3_moe": {
        **_BASE,
        **_EXPERTS,
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "mixtral": {**_BASE, **_EXPERTS, "model_type": "mixtral"},
    "phi3": {**_BASE, "model_type": "phi3", "rope_scaling": None},
    "gemma3_text": {
        **_BASE,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "rope_global_base_freq": 10000.0,
        "rope_local_base_freq": 10000.0,
    },
    "gpt_oss": {
        **_BASE,
        **_EXPERTS,
        "model_type": "gpt_oss",
        "sliding_window": WINDOW,
        "layer_types": _WINDOW_TYPES,
        "rope_scaling": {"rope_type": "default", "factor": 1.0},
    },
    "cohere2": {
        **_BASE,
        "model_type": "cohere2",
        "layer_norm_eps": 1e-5,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "logit_scale": 0.5,
        "tie_word_embeddings": True,
    },
    "olmo3": {
        **_BASE,
        "model_type": "olmo3",
        "sliding_window": WINDOW,
        "layer_types": _WINDOW_TYPES,
    },
}
"""Models whose attention is on the blocks alone, by a name of ours."""

GATHERED = ("deepseek_v3", "gemma4_text", "plamo", "smollm3")
"""Model types that read K and V themselves."""

HYBRID = ("falcon_h1", "kimi_linear", "lfm2", "mamba2", "qwen3_5", "rwkv7")
"""Model types with a recurrent state."""


def build_model(config: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """A model with random float32 weights, large enough that logits differ clearly."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(dict(config)))
    keys = iter(mx.random.split(mx.random.key(seed), len(tree_flatten(model.parameters()))))

    def fill(array: mx.array) -> mx.array:
        key = next(keys)
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        scale = 0.3 if array.ndim > 1 else 0.1
        noise = mx.random.normal(array.shape, key=key) * scale
        return noise if array.ndim > 1 else 1.0 + noise

    model.update(tree_map(fill, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def tiny_model(name: str = "llama", seed: int = 0) -> LoadedModel:
    """One of ``CONFIGS`` or of mlx-lm's model types as if it had been loaded."""
    config = _config(name)
    model = build_model(config, seed)
    return LoadedModel(
        model=model,
        config=config,
        path=Path(name),
        model_type=config["model_type"],
        max_model_len=config.get("max_position_embeddings"),
        eos_token_ids=frozenset({1}),
        gguf_metadata=None,
        dtype="float32",
        model_id=f"{name}-{seed}",
        parameter_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
    )


def _config(name: str) -> Mapping[str, Any]:
    return CONFIGS[name] if name in CONFIGS else zoo_config(name)


def save_tiny_folder(
    path: Path, name: str = "llama", seed: int = 0, max_model_len: int = 4096
) -> Path:
    """Write a folder that loads: config, weights, byte-level tokenizer and chat template."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        **_config(name),
        "max_position_embeddings": max_model_len,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    weights = dict(tree_flatten(build_model(config, seed).parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"eos_token_id": [1, 2]})
    _byte_tokenizer().save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|start|>",
            "eos_token": "<|eos|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_model_len,
            "chat_template": _CHAT_TEMPLATE,
        },
    )
    return path


_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] "
    f"+ '{END_OF_TURN}' }}}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _byte_tokenizer() -> Tokenizer:
    """One token for every byte, after the special ones; the rest of the vocabulary is unused."""
    special = ["<|start|>", "<|eos|>", END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
