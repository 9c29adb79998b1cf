"""Tiny models laid out as sentence-transformers has it, and what plain mlx-lm makes of a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, processors

from tests.support.tiny_models import build_model, save_tiny_folder

EOS = 1
MODULES = ("Transformer", "Pooling", "Normalize")


def save_embedding_folder(
    path: Path,
    mode: str = "lasttoken",
    *,
    name: str = "qwen3",
    modules: Iterable[str] = MODULES,
    pooling: Mapping[str, Any] | None = None,
    adds_eos: bool = True,
    has_head: bool = True,
    has_prefix: bool = True,
    **config: Any,
) -> Path:
    """Like ``save_tiny_folder``, with modules.json, pooling, and a tokenizer that ends texts."""
    save_tiny_folder(path, name)
    known = json.loads((path / "config.json").read_text())
    write_json(path / "config.json", {**known, **config})
    listed = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{kind}",
            "type": kind if "." in kind else f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(modules)
    ]
    write_json(path / "modules.json", listed)
    (path / "1_Pooling").mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    told: dict[str, Any] = {f"pooling_mode_{each}": each == mode for each in modes}
    told["word_embedding_dimension"] = known.get("text_config", known)["hidden_size"]
    write_json(path / "1_Pooling" / "config.json", told if pooling is None else dict(pooling))
    if adds_eos:
        file = str(path / "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|eos|>", special_tokens=[("<|eos|>", EOS)]
        )
        tokenizer.save(file)
    file = str(path / "model.safetensors")
    weights: Any = mx.load(file)
    mx.eval(list(weights.values()))
    if not has_head:
        weights.pop("lm_head.weight", None)
    if not has_prefix:
        weights = {key.removeprefix("model."): array for key, array in weights.items()}
    mx.save_safetensors(file, weights, metadata={"format": "mlx"})
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


class PlainEmbedder:
    """The same weights run by mlx-lm alone, one prompt at a time, with no cache."""

    def __init__(self, folder: Path, mode: str = "lasttoken", *, normalize: bool = True) -> None:
        self._model: Any = build_model(json.loads((folder / "config.json").read_text()))
        self._mode, self._normalize = mode, normalize

    def __call__(self, token_ids: Sequence[int], dimensions: int | None = None) -> np.ndarray:
        hidden = np.array(self._model.model(mx.array(list(token_ids))[None])[0], np.float64)
        rows = {"lasttoken": hidden[-1:], "cls_token": hidden[:1]}.get(self._mode, hidden)
        vector = rows.mean(axis=0)[:dimensions]
        return vector / np.linalg.norm(vector) if self._normalize else vector
