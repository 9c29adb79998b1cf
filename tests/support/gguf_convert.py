"""Converts a tiny model folder to a GGUF file the way the usual converters do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.support.gguf_writer import (
    ARRAY,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    GGUFFile,
    encode_tensor,
)

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert_folder(folder: Path, types: Mapping[str, str] | None = None) -> GGUFFile:
    """A GGUF file of the folder's model, and the folder rewritten to what the file can hold.

    Args:
        folder: As ``save_tiny_folder`` writes it; of the type llama, qwen2 or qwen3.
        types: Last part of a tensor's GGUF name before ``.weight``, to its type; F32 otherwise.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name: np.array(array.astype(mx.float32))
        for name, array in _load(folder / "model.safetensors").items()
    }
    file = GGUFFile(metadata=_metadata(folder, config))
    for name, values in weights.items():
        theirs = _name(name)
        *_, tensor, part = theirs.split(".")
        type_name = (types or {}).get(tensor, "F32") if part == "weight" else "F32"
        _, rounded = encode_tensor(type_name, values)
        weights[name] = rounded.astype(np.float32)
        if config["model_type"] == "llama" and tensor in ("attn_q", "attn_k"):
            values = _permuted(values, config["head_dim"])
        raw, _ = encode_tensor(type_name, values)
        file.tensors[theirs] = (type_name, values.shape, raw)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {name: mx.array(values) for name, values in weights.items()},
        metadata={"format": "mlx"},
    )
    return file


def _load(path: Path) -> dict[str, mx.array]:
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    return arrays


def _permuted(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """The halves of each head interleaved: RoPE's pairs side by side."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _name(name: str) -> str:
    stem, _, part = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{part}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.{part}"


def _metadata(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    kind = config["model_type"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    tokens += [f"[PAD{index}]" for index in range(len(tokens), config["vocab_size"])]
    types = [3 if token in special else 1 if token in vocab else 5 for token in tokens]
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    return {
        "general.architecture": (STRING, kind),
        f"{kind}.block_count": (UINT32, config["num_hidden_layers"]),
        f"{kind}.context_length": (UINT32, config["max_position_embeddings"]),
        f"{kind}.embedding_length": (UINT32, config["hidden_size"]),
        f"{kind}.feed_forward_length": (UINT32, config["intermediate_size"]),
        f"{kind}.attention.head_count": (UINT32, config["num_attention_heads"]),
        f"{kind}.attention.head_count_kv": (UINT32, config["num_key_value_heads"]),
        f"{kind}.attention.key_length": (UINT32, config["head_dim"]),
        f"{kind}.attention.layer_norm_rms_epsilon": (FLOAT32, config["rms_norm_eps"]),
        f"{kind}.rope.freq_base": (FLOAT32, config["rope_theta"]),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "qwen2" if kind.startswith("qwen") else "gpt-2"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, types)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, [])),
        "tokenizer.ggml.bos_token_id": (UINT32, config["bos_token_id"]),
        "tokenizer.ggml.eos_token_id": (UINT32, config["eos_token_id"]),
        "tokenizer.chat_template": (STRING, template),
    }
