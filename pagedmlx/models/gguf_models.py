"""What a GGUF file of a known architecture means: mlx-lm's config and weight names.

Pure Python on a checked header; refuses whatever it would otherwise have to guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedmlx.errors import ModelLoadError, UnsupportedModelError
from pagedmlx.models.gguf import GGUFHeader

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of RoPE's frequencies, the form that the scaling of Llama 3 takes in GGUF files."""

_MAX_INT = 2**31 - 1

_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How one architecture differs from the plain one.

    Attributes:
        layer_names: Further tensors of a layer, theirs to ours.
        permuted: Converters have permuted q and k, so that RoPE's pairs lie side by side.
        free_head_dim: The head size need not be hidden size / heads.
        rope_factors: May bring ``ROPE_FACTORS``.
    """

    layer_names: Mapping[str, str] = field(default_factory=dict[str, str])
    permuted: bool = False
    free_head_dim: bool = True
    rope_factors: bool = False


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture(permuted=True, rope_factors=True),
    "qwen2": _Architecture(
        {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}, free_head_dim=False
    ),
    "qwen3": _Architecture({f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}),
}


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """A model as mlx-lm wants it.

    Attributes:
        config: For the ``ModelArgs`` of mlx-lm's ``model_type``, ``eos_token_id`` as a list.
        parameter_names: The file's tensor names, to those of mlx-lm's parameters.
        has_rope_factors: Whether the file has ``ROPE_FACTORS``, one for each pair of a head.
    """

    config: Mapping[str, Any]
    parameter_names: Mapping[str, str]
    has_rope_factors: bool


def describe(header: GGUFHeader, name: str) -> GGUFModel:
    """Turn a header into a config and names, checking every tensor's shape against it.

    Args:
        header: From ``read_header``.
        name: The file's, for messages.

    Raises:
        ModelLoadError: Metadata is missing, absurd, or contradicts the tensors.
        UnsupportedModelError: Another architecture, or a part that mlx-lm's model lacks.
    """
    kind = _text(header.metadata, "general.architecture", name)
    architecture = _ARCHITECTURES.get(kind)
    if architecture is None:
        raise UnsupportedModelError(
            f"{name}: GGUF architecture {kind!r} is not supported, only "
            f"{', '.join(_ARCHITECTURES)}",
            hint=_OTHER_FORM,
        )
    fields = _Fields(header.metadata, name, kind)
    num_parts = fields.metadata.get("split.count", 0)
    if isinstance(num_parts, int) and num_parts > 1:
        raise UnsupportedModelError(
            f"{name}: one of {num_parts} parts of a split model", hint="merge the parts first"
        )
    config = _config(fields, header, architecture)
    names = dict(_names(config, architecture))
    has_rope_factors = architecture.rope_factors and ROPE_FACTORS in header.tensors
    shapes = {theirs: _shape(config, theirs) for theirs in names}
    if has_rope_factors:
        shapes[ROPE_FACTORS] = (config["head_dim"] // 2,)
    _check_tensors(header, shapes, f"{name}: ", kind)
    return GGUFModel(config, names, has_rope_factors)


_OTHER_FORM = "use the model's MLX or safetensors folder instead"


def _text(metadata: Mapping[str, Any], key: str, name: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str):
        raise _damaged(name, key, "is missing or not a string")
    return value


def _damaged(name: str, key: str, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"{name}: metadata {key!r} {what}", hint="the file is damaged; fetch it again"
    )


class _Fields:
    """An architecture's metadata with the types and ranges that it must have."""

    def __init__(self, metadata: Mapping[str, Any], name: str, architecture: str) -> None:
        self.metadata = metadata
        self.name = name
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None, high: int = _MAX_INT) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise self._fail(key, f"is {value!r}; a whole number from 1 to {high} is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self._fail(key, f"is {value!r}; a number above 0 is needed")
        return float(value)

    def _fail(self, key: str, what: str) -> ModelLoadError:
        return _damaged(self.name, f"{self.architecture}.{key}", what)


def _config(fields: _Fields, header: GGUFHeader, architecture: _Architecture) -> dict[str, Any]:
    name = fields.name
    if fields.get("expert_count", 0):
        raise UnsupportedModelError(
            f"{name}: a mixture of experts in GGUF form is not supported", hint=_OTHER_FORM
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{name}: the tensor 'token_embd.weight' is missing or not a matrix")
    vocab_size, hidden_size = embedding.shape
    # A layer has several tensors, so the tensor count bounds the layers before any is made.
    num_layers = fields.integer("block_count", high=len(header.tensors))
    num_heads = fields.integer("attention.head_count", high=hidden_size)
    return {
        "model_type": fields.architecture,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer(
            "attention.head_count_kv", default=num_heads, high=num_heads
        ),
        "head_dim": _head_dim(fields, architecture, hidden_size, num_heads),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab_size,
        "max_position_embeddings": fields.integer("context_length"),
        "rope_theta": fields.number("rope.freq_base", default=10000.0),
        "rope_traditional": architecture.permuted,
        "rope_scaling": _rope_scaling(fields),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": _end_tokens(fields.metadata, vocab_size),
    }


def _head_dim(
    fields: _Fields, architecture: _Architecture, hidden_size: int, num_heads: int
) -> int:
    usual = hidden_size // num_heads
    head_dim = fields.integer("attention.key_length", default=usual, high=hidden_size)
    wanted = {"attention.value_length": head_dim, "rope.dimension_count": head_dim}
    if not architecture.free_head_dim:
        wanted["attention.key_length"] = usual
    for key, needed in wanted.items():
        if fields.integer(key, default=needed) != needed:
            raise UnsupportedModelError(
                f"{fields.name}: {fields.architecture}.{key} is {fields.get(key)}, the head size "
                f"{needed}; mlx-lm's {fields.architecture} needs them equal"
            )
    return head_dim


def _end_tokens(metadata: Mapping[str, Any], vocab_size: int) -> list[int]:
    """The ends of the text, of a turn and of a message."""
    ids = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    return sorted(token for token in ids if isinstance(token, int) and 0 <= token < vocab_size)


def _rope_scaling(fields: _Fields) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": fields.number("rope.scaling.factor")}
    raise UnsupportedModelError(
        f"{fields.name}: RoPE scaling {kind!r} in GGUF form is not supported", hint=_OTHER_FORM
    )


def _names(config: Mapping[str, Any], architecture: _Architecture) -> Iterator[tuple[str, str]]:
    yield "token_embd.weight", "model.embed_tokens.weight"
    yield "output_norm.weight", "model.norm.weight"
    if not config["tie_word_embeddings"]:
        yield "output.weight", "lm_head.weight"
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in {**_LAYER_NAMES, **architecture.layer_names}.items():
            yield f"blk.{layer}.{theirs}", f"model.layers.{layer}.{ours}"


def _shape(config: Mapping[str, Any], theirs: str) -> tuple[int, ...]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    inner, vocab = config["intermediate_size"], config["vocab_size"]
    tensor, _, part = theirs.rpartition(".")
    rows, columns = {
        "token_embd": (vocab, hidden),
        "output": (vocab, hidden),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        "attn_q_norm": (head_dim, None),
        "attn_k_norm": (head_dim, None),
    }.get(tensor.rpartition(".")[2], (hidden, None))
    return (rows,) if columns is None or part == "bias" else (rows, columns)


def _check_tensors(
    header: GGUFHeader, shapes: Mapping[str, tuple[int, ...]], where: str, architecture: str
) -> None:
    for name, expected in shapes.items():
        tensor = header.tensors.get(name)
        if tensor is None:
            raise ModelLoadError(
                f"{where}the tensor {name!r} is missing",
                hint="the file is damaged or only one part of a split model",
            )
        if tensor.shape != expected:
            raise ModelLoadError(
                f"{where}the tensor {name!r} has shape {tensor.shape}, not {expected}",
                hint="the file is damaged; fetch it again",
            )
        if len(expected) == 1 and tensor.type not in ("F32", "F16", "BF16"):
            raise ModelLoadError(f"{where}the tensor {name!r} is {tensor.type}, not F32")
    for extra in header.tensors:
        if extra not in shapes:
            raise UnsupportedModelError(
                f"{where}the tensor {extra!r} has no place in mlx-lm's {architecture}",
                hint=_OTHER_FORM,
            )
