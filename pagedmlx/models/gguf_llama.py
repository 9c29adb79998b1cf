"""What a GGUF file of the architecture ``llama`` means: mlx-lm's config and weight names.

Pure Python on a checked header; refuses whatever it would otherwise have to guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagedmlx.errors import ModelLoadError, UnsupportedModelError
from pagedmlx.models.gguf import GGUFHeader

ARCHITECTURE = "llama"
_MAX_INT = 2**31 - 1

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class GGUFLlama:
    """A llama model as mlx-lm wants it.

    Attributes:
        config: For mlx-lm's llama ``ModelArgs``, with ``eos_token_id`` as a list.
        module_names: The file's tensor name without ``.weight``, to mlx-lm's module.
    """

    config: Mapping[str, Any]
    module_names: Mapping[str, str]


def describe(header: GGUFHeader, name: str) -> GGUFLlama:
    """Turn a header into a config and names, checking every tensor's shape against it.

    Args:
        header: From ``read_header``.
        name: The file's, for messages.

    Raises:
        ModelLoadError: Metadata is missing, absurd, or contradicts the tensors.
        UnsupportedModelError: Another architecture, or a part that mlx-lm's llama lacks.
    """
    fields = _Fields(header.metadata, name)
    architecture = fields.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise UnsupportedModelError(
            f"{name}: GGUF architecture {architecture!r} is not supported, only {ARCHITECTURE!r}",
            hint="use the model's MLX or safetensors folder instead",
        )
    config = _config(fields, header)
    module_names = dict(_modules(config))
    _check_tensors(header, config, module_names, name)
    return GGUFLlama(config=config, module_names=module_names)


class _Fields:
    """Metadata with the types and ranges that it must have."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self.metadata = metadata
        self.name = name

    def fail(self, key: str, what: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.name}: metadata {key!r} {what}", hint="the file is damaged; fetch it again"
        )

    def text(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise self.fail(key, "is missing or not a string")
        return value

    def integer(self, key: str, default: int | None = None, high: int = _MAX_INT) -> int:
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise self.fail(key, f"is {value!r}; a whole number from 1 to {high} is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self.fail(key, f"is {value!r}; a number above 0 is needed")
        return float(value)


def _config(fields: _Fields, header: GGUFHeader) -> dict[str, Any]:
    name = fields.name
    if fields.metadata.get("llama.expert_count", 0):
        raise UnsupportedModelError(
            f"{name}: a mixture of experts in GGUF form is not supported",
            hint="use the model's MLX or safetensors folder instead",
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{name}: the tensor 'token_embd.weight' is missing or not a matrix")
    vocab_size, hidden_size = embedding.shape
    # A layer has several tensors, so the tensor count bounds the layers before any is made.
    num_layers = fields.integer("llama.block_count", high=len(header.tensors))
    num_heads = fields.integer("llama.attention.head_count", high=hidden_size)
    head_dim = fields.integer(
        "llama.attention.key_length", default=hidden_size // num_heads, high=hidden_size
    )
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.integer(key, default=head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{name}: {key} is {fields.metadata[key]}, the head size {head_dim}; "
                "mlx-lm's llama needs them equal"
            )
    context = fields.integer("llama.context_length")
    eos = {
        fields.metadata[key]
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        if isinstance(fields.metadata.get(key), int)
    }
    return {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "intermediate_size": fields.integer("llama.feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer(
            "llama.attention.head_count_kv", default=num_heads, high=num_heads
        ),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("llama.attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab_size,
        "max_position_embeddings": context,
        "rope_theta": fields.number("llama.rope.freq_base", default=10000.0),
        # Converters to GGUF permute q and k so that the pairs of RoPE lie side by side.
        "rope_traditional": True,
        "rope_scaling": _rope_scaling(fields),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": sorted(token for token in eos if 0 <= token < vocab_size),
    }


def _rope_scaling(fields: _Fields) -> dict[str, Any] | None:
    kind = fields.metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": fields.number("llama.rope.scaling.factor")}
    raise UnsupportedModelError(
        f"{fields.name}: RoPE scaling {kind!r} in GGUF form is not supported",
        hint="use the model's MLX or safetensors folder instead",
    )


def _modules(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "token_embd", "model.embed_tokens"
    yield "output_norm", "model.norm"
    if not config["tie_word_embeddings"]:
        yield "output", "lm_head"
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in _LAYER_NAMES.items():
            yield f"blk.{layer}.{theirs}", f"model.layers.{layer}.{ours}"


def _shape(config: Mapping[str, Any], theirs: str) -> tuple[int, ...]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    inner = config["intermediate_size"]
    return {
        "token_embd": (config["vocab_size"], hidden),
        "output": (config["vocab_size"], hidden),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }.get(theirs, (hidden,))


def _check_tensors(
    header: GGUFHeader, config: Mapping[str, Any], module_names: Mapping[str, str], name: str
) -> None:
    for theirs in module_names:
        tensor = header.tensors.get(f"{theirs}.weight")
        if tensor is None:
            raise ModelLoadError(
                f"{name}: the tensor '{theirs}.weight' is missing",
                hint="the file is damaged or only one part of a split model",
            )
        expected = _shape(config, theirs.rpartition(".")[2])
        if tensor.shape != expected:
            raise ModelLoadError(
                f"{name}: the tensor '{tensor.name}' has shape {tensor.shape}, not {expected}",
                hint="the file is damaged; fetch it again",
            )
        if len(expected) == 1 and tensor.type not in ("F32", "F16"):
            raise ModelLoadError(f"{name}: the tensor '{tensor.name}' is {tensor.type}, not F32")
    known = {f"{theirs}.weight" for theirs in module_names}
    for extra in header.tensors:
        if extra not in known:
            raise UnsupportedModelError(
                f"{name}: the tensor {extra!r} has no place in mlx-lm's llama",
                hint="use the model's MLX or safetensors folder instead",
            )
