"""A tiny model with a real tokenizer and room for what agents send."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.support.tiny_models import CONFIGS, build_model
from tests.support.tokenizers import smollm2_tokenizer


def save_agent_folder(path: Path, *, template: str | None = None, max_len: int = 16384) -> Path:
    """Write a folder that loads: random weights, and the tokenizer of the embedded model.

    Args:
        path: The folder.
        template: Another chat template than the tokenizer's own.
        max_len: Longest prompt plus answer.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = smollm2_tokenizer()
    config = {
        **CONFIGS["llama_tied"],
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": max_len,
        "eos_token_id": min(tokenizer.eos_token_ids),
    }
    weights = dict(tree_flatten(build_model(config).parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer._inner.save_pretrained(path)
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path
