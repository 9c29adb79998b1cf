"""Builds mlx-lm's model from a GGUF file: the header is checked first, MLX unpacks the weights."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from pagedmlx.errors import ModelLoadError, first_line
from pagedmlx.models.gguf import GGUFHeader, TensorInfo, read_header
from pagedmlx.models.gguf_models import ROPE_FACTORS, GGUFModel, describe
from pagedmlx.models.weights import check_memory

_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_GROUP_SIZE = 32


def load_gguf(
    path: Path, max_bytes: int | None = None
) -> tuple[nn.Module, dict[str, Any], Mapping[str, Any]]:
    """Load a ``.gguf`` file; quantised tensors keep their bits, in MLX's layout.

    Args:
        path: The file.
        max_bytes: Most that its tensors may take.

    Returns:
        The model, its config as mlx-lm would have it, and the file's metadata.

    Raises:
        ModelLoadError: The file is damaged, or memory is too small.
        UnsupportedModelError: An architecture or tensor type that isn't run.
    """
    header = read_header(path)
    described = describe(header, path.name)
    # MLX reads a whole GGUF file at once.
    num_bytes = sum(tensor.num_bytes for tensor in header.tensors.values())
    check_memory(num_bytes, max_bytes, f"{path.name}: its weights")
    tensors = _read_tensors(path, header)
    config = dict(described.config)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    _quantize(model, header, described)
    weights = [
        (ours.removesuffix("weight") + part, tensors[theirs.removesuffix("weight") + part])
        for theirs, ours in described.parameter_names.items()
        for part in _parts(header.tensors[theirs])
    ]
    try:
        model.load_weights(weights, strict=True)
    except ValueError as error:
        raise ModelLoadError(f"{path.name}: {first_line(error)}") from error
    if described.has_rope_factors:
        _scale_rope(model, config, tensors[ROPE_FACTORS])
    model.eval()
    return model, config, header.metadata


def _read_tensors(path: Path, header: GGUFHeader) -> dict[str, mx.array]:
    try:
        tensors = mx.load(str(path), format="gguf")
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{path.name}: MLX can't read it: {first_line(error)}") from error
    assert isinstance(tensors, dict)
    for name, info in header.tensors.items():
        # MLX makes float16 of bfloat16, which has a smaller range.
        if info.type == "BF16":
            num = info.num_bytes // 2
            raw = np.fromfile(path, np.uint16, num, offset=info.offset).reshape(info.shape)
            tensors[name] = mx.array(raw).view(mx.bfloat16)
    return tensors


def _parts(tensor: TensorInfo) -> tuple[str, ...]:
    """What stands in the place of ``weight`` at the end of the names of a tensor's arrays."""
    if not tensor.name.endswith("weight"):
        return ("",)
    return ("weight", "scales", "biases") if tensor.type in _BITS else ("weight",)


def _quantize(model: nn.Module, header: GGUFHeader, described: GGUFModel) -> None:
    bits = {
        ours.removesuffix(".weight"): _BITS.get(header.tensors[theirs].type)
        for theirs, ours in described.parameter_names.items()
    }

    def quantization(name: str, _module: nn.Module) -> bool | dict[str, Any]:
        found = bits.get(name)
        return found is not None and {"group_size": _GROUP_SIZE, "bits": found}

    nn.quantize(model, _GROUP_SIZE, 4, class_predicate=quantization)


def _scale_rope(model: Any, config: Mapping[str, Any], factors: mx.array) -> None:
    from mlx_lm.models.rope_utils import Llama3RoPE

    dims, base = config["head_dim"], config["rope_theta"]
    linear = (config["rope_scaling"] or {}).get("factor", 1.0)
    periods = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    for layer in model.model.layers:
        # The class applies given periods; those that it derives itself are put aside.
        rope = Llama3RoPE(dims, traditional=True, base=base, scaling_config={"factor": 1.0})
        rope._freqs = periods * factors.astype(mx.float32) * linear
        layer.self_attn.rope = rope
