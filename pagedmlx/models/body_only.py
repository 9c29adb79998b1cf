"""Lets mlx-lm load a folder that lacks a model's head, as sentence-transformers saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pagedmlx.models.embedding import MODULES_FILE

_BODY = "model."
_HEAD = "lm_head."
_MARK = "embed_tokens.weight"


def loading_settings(path: Path) -> dict[str, Any]:
    """Arguments for mlx-lm's ``load_model``; none for a folder with a whole model.

    One tied to the input embeddings takes the head's place, which no embedding depends on. The
    body's weights may lack the prefix that they have in the whole.

    Args:
        path: The folder.

    Raises:
        Exception: Whatever MLX raises for weights that can't be read.
    """
    if not (path / MODULES_FILE).is_file():
        return {}
    names = {name for file in path.glob("model*.safetensors") for name in _names(file)}
    is_bare = _MARK in names and not any(name.startswith(_BODY) for name in names)
    settings: dict[str, Any] = {"get_model_classes": _classes} if is_bare else {}
    has_head = any(_HEAD in name for name in names)
    if not has_head and (is_bare or f"{_BODY}{_MARK}" in names):
        settings["model_config"] = {"tie_word_embeddings": True}
    return settings


def _names(file: Path) -> list[str]:
    loaded: Any = mx.load(str(file))  # lazy: only the names are read
    return list(loaded)


def _classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    from mlx_lm.utils import _get_classes

    found: tuple[Any, type] = _get_classes(config)
    model_class, arguments = found

    def sanitize(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        named = {
            name if name.startswith(_HEAD) else f"{_BODY}{name}": array
            for name, array in weights.items()
        }
        # From now on it is a model like any other.
        model.__class__ = model_class
        return model.sanitize(named) if hasattr(model, "sanitize") else named

    members = {"sanitize": sanitize, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members), arguments
