"""Lets mlx-lm load a folder with the body of a model alone, as sentence-transformers saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pagedmlx.models.embedding import MODULES_FILE

_BODY = "model."
_MARK = "embed_tokens.weight"


def loading_settings(path: Path) -> dict[str, Any]:
    """Arguments for mlx-lm's ``load_model``; none for a folder with a whole model.

    A body's weights lack the prefix that they have in the whole, and there is no head. One tied to
    the embeddings takes its place, which no embedding depends on.

    Args:
        path: The folder.

    Raises:
        Exception: Whatever MLX raises for weights that can't be read.
    """
    if not (path / MODULES_FILE).is_file():
        return {}
    names = [name for file in path.glob("model*.safetensors") for name in _names(file)]
    if _MARK not in names or any(name.startswith(_BODY) for name in names):
        return {}
    return {"model_config": {"tie_word_embeddings": True}, "get_model_classes": _classes}


def _names(file: Path) -> list[str]:
    loaded: Any = mx.load(str(file))  # lazy: only the names are read
    return list(loaded)


def _classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    from mlx_lm.utils import _get_classes

    found: tuple[Any, type] = _get_classes(config)
    model_class, arguments = found

    def sanitize(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        named = {f"{_BODY}{name}": array for name, array in weights.items()}
        # From now on it is a model like any other.
        model.__class__ = model_class
        return model.sanitize(named) if hasattr(model, "sanitize") else named

    members = {"sanitize": sanitize, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members), arguments
