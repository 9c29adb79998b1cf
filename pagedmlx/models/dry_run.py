"""A pass through a model that computes nothing, and shows what its code does with its layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache


def dry_run(model: nn.Module, num_tokens: int = 1) -> bool:
    """Call a model on the first tokens of a text; nothing is evaluated.

    Args:
        model: One of mlx-lm's models, with stand-ins for layers that are to be watched.
        num_tokens: Tokens of the text.

    Returns:
        Whether the model came to its end, so that what was seen is all that it does.
    """
    whole_model: Any = model
    try:
        whole_model(mx.zeros((1, num_tokens), mx.int32), cache=make_prompt_cache(model))
    except Exception:
        # Anything may come out of model code; the survey will say what is wrong.
        return False
    return True


def distinct_modules(model: nn.Module) -> Iterable[nn.Module]:
    """The modules of a model, each once, however many places it has."""
    return {id(module): module for module in model.modules()}.values()
