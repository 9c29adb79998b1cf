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
    return lazy_logits(model, mx.zeros(num_tokens, mx.int32)) is not None


def lazy_logits(model: nn.Module, token_ids: mx.array) -> mx.array | None:
    """The same with these tokens, (T,); gives (1, T, vocab_size), or None if the model failed."""
    whole_model: Any = model
    try:
        return whole_model(token_ids[None], cache=make_prompt_cache(model))
    except Exception:
        # Anything may come out of model code; the survey will say what is wrong.
        return None


def can_be_traced(model: nn.Module) -> bool:
    """Whether the model's code looks at no value that it computes, so that MLX can compile it."""

    def call(token_ids: mx.array) -> mx.array:
        logits = lazy_logits(model, token_ids)
        return mx.zeros(0) if logits is None else logits

    return mx.compile(call)(mx.zeros(1, mx.int32)).size > 0


def distinct_modules(model: nn.Module) -> Iterable[nn.Module]:
    """The modules of a model, each once, however many places it has."""
    return {id(module): module for module in model.modules()}.values()
