"""Changes the form of a loaded model's weights: expands quantised layers, casts the type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from pagedmlx.errors import ModelLoadError, readable_bytes


def check_memory(num_bytes: int, max_bytes: int | None, what: str, *, hint: str = "") -> None:
    """Refuse weights that memory has no room for, before they are read.

    Raises:
        ModelLoadError: There are more than ``max_bytes``; gives both numbers.
    """
    if max_bytes is not None and num_bytes > max_bytes:
        raise ModelLoadError(
            f"{what} take {readable_bytes(num_bytes)} of memory, and {readable_bytes(max_bytes)} "
            "are there for them",
            hint=hint
            or "take a smaller or more strongly quantised model, or raise --gpu-memory-utilization",
        )


def named_parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    """Every parameter of a model with its dotted name."""
    return cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))


_Quantized = (
    nn.QuantizedLinear | nn.QuantizedEmbedding | QuantizedSwitchLinear | QuantizedMultiLinear
)


def dequantize(model: nn.Module) -> bool:
    """Replace quantised layers by plain float32 ones, in place; tell whether there were any."""
    plain = [
        (name, _plain_layer(module))
        for name, module in model.named_modules()
        if isinstance(module, _Quantized)
    ]
    if plain:
        model.update_modules(tree_unflatten(plain))
    return bool(plain)


def _plain_layer(module: _Quantized) -> nn.Module:
    scales, biases = module.scales, module.get("biases")
    if biases is not None:
        # Expanding in float32 keeps what 16-bit scales would round away.
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    global_scale = module.get("global_scale")

    def expand(
        weight: mx.array, scales: mx.array, global_scale: mx.array | None = None
    ) -> mx.array:
        return mx.dequantize(
            weight,
            scales,
            biases,
            module.group_size,
            module.bits,
            mode=module.mode,
            global_scale=global_scale,
            dtype=mx.float32,
        )

    if global_scale is None:
        weight = expand(module.weight, scales)
    else:  # one for each expert
        experts = zip(module.weight, scales, global_scale, strict=True)
        weight = mx.stack([expand(*expert) for expert in experts])
    if isinstance(module, nn.QuantizedEmbedding):
        layer: nn.Module = nn.Embedding(1, 1)
    elif isinstance(module, nn.QuantizedLinear):
        layer = nn.Linear(1, 1, bias=False)
    elif isinstance(module, QuantizedSwitchLinear):
        layer = SwitchLinear(1, 1, 1, bias=False)
    else:
        layer = MultiLinear(1, 1, 1)
    layer.weight = weight
    if "bias" in module:
        layer.bias = module["bias"]
    return layer


def cast_parameters(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast every floating-point parameter that the model allows to be cast, in place."""
    allowed: Callable[[str], bool] = getattr(model, "cast_predicate", _always)
    parameters = [
        (name, array.astype(dtype))
        for name, array in named_parameters(model)
        if mx.issubdtype(array.dtype, mx.floating) and allowed(name)
    ]
    model.update(tree_unflatten(parameters))


def _always(_name: str) -> bool:
    return True


def main_dtype(model: nn.Module) -> mx.Dtype:
    """The floating-point type that most parameters have (scales count, packed integers don't)."""
    sizes: Counter[mx.Dtype] = Counter()
    for _, array in named_parameters(model):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] += array.size
    return sizes.most_common(1)[0][0] if sizes else mx.float32
