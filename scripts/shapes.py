"""Models of a real one's shape with random weights, for measuring where no real one is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import llama

from pagedmlx.config import EngineConfig
from pagedmlx.engine.build import build_engine
from pagedmlx.engine.engine import Engine
from pagedmlx.engine.load import load_engine
from pagedmlx.hub import resolve
from pagedmlx.models.loader import LoadedModel, load_model
from pagedmlx.models.weights import named_parameters
from pagedmlx.text.answer_style import AnswerStyle

_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
_MINI = {
    **_8B,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
_4_BIT = "-4bit"
SHAPES = {"8b": _8B, "mini": _MINI}
"""Llama 3 8B's, and one that any machine computes at once; also with -4bit behind the name."""


class NoText:
    """Stands in for a tokenizer: random weights have nothing to say."""

    eos_token_ids: frozenset[int] = frozenset()
    special_token_ids: frozenset[int] = frozenset()
    has_chat_template = False
    joins_bytes = False

    def token_stream(self, **_: object) -> NoText:
        """A stream that turns every token into nothing."""
        return self

    def push(self, _token: int) -> str:
        """The text of one more token."""
        return ""

    def flush(self) -> str:
        """The text that was held back."""
        return ""

    def ids_of(self, _tokens: object) -> frozenset[int]:
        """No string is a token."""
        return frozenset()

    def find_style(self, _find_syntax: Callable[..., object]) -> AnswerStyle:
        """Answers without marks."""
        return AnswerStyle()


def load(name: str) -> LoadedModel:
    """A model by its shape's name, or as pagedmlx takes it."""
    shape = SHAPES.get(name.removesuffix(_4_BIT))
    if shape is not None:
        return _random(shape, 4 if name.endswith(_4_BIT) else None)
    resolved = resolve(name)
    return load_model(resolved.path, name=resolved.name)


def make_engine(model: str | LoadedModel, **settings: Any) -> Engine:
    """An engine for a model by its name, as ``load`` takes it, or for one in memory without text.

    Args:
        model: The model.
        settings: Of ``EngineConfig``.
    """
    if isinstance(model, str):
        if model.removesuffix(_4_BIT) not in SHAPES:
            return load_engine(EngineConfig(model=model, **settings))
        model = load(model)
    tokenizer: Any = NoText()
    notes: list[str] = []
    return build_engine(
        model,
        tokenizer,
        EngineConfig(**settings),
        on_progress=lambda what, _: notes.append(what),
    )


def _random(shape: dict[str, Any], bits: int | None) -> LoadedModel:
    """A Llama with random weights, in bfloat16 or quantised; in float32 on a CPU."""
    mx.random.seed(0)
    dtype = mx.bfloat16 if mx.default_device() == mx.Device(mx.gpu) else mx.float32
    model = llama.Model(llama.ModelArgs.from_dict(shape))
    # In place and layer by layer: the float32 weights that MLX makes first need not all exist.
    model.update(
        tree_map(
            lambda a: (
                mx.random.normal(a.shape, dtype, scale=0.02)
                if a.ndim > 1
                else mx.ones(a.shape, dtype)
            ),
            model.parameters(),
        )
    )
    mx.eval(model.parameters())
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)
        mx.eval(model.parameters())
    model.eval()
    return LoadedModel(
        model=model,
        config=shape,
        path=Path("random"),
        model_type="llama",
        max_model_len=shape["max_position_embeddings"],
        eos_token_ids=frozenset(),
        gguf_metadata=None,
        dtype=str(dtype).removeprefix("mlx.core."),
        model_id=f"random-{bits}",
        parameter_bytes=sum(a.nbytes for _, a in named_parameters(model)),
    )
