"""Changes the form of a loaded model's weights: expands quantised layers, casts the type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear


def named_parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    """Every parameter of a model with its dotted name."""
    return cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))


def dequantize(model: nn.Module) -> None:
    """Replace quantised linear, embedding and expert layers by plain float32 ones, in place."""
    plain = [
        (name, _plain_layer(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding | QuantizedSwitchLinear)
    ]
    if plain:
        model.update_modules(tree_unflatten(plain))


def _plain_layer(
    module: nn.QuantizedLinear | nn.QuantizedEmbedding | QuantizedSwitchLinear,
) -> nn.Module:
    scales, biases = module.scales, module.get("biases")
    if biases is not None:
        # Expanding in float32 keeps what 16-bit scales would round away.
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    weight = mx.dequantize(
        module.weight, scales, biases, module.group_size, module.bits, mode=module.mode
    ).astype(mx.float32)
    if isinstance(module, nn.QuantizedEmbedding):
        layer: nn.Module = nn.Embedding(1, 1)
    elif isinstance(module, nn.QuantizedLinear):
        layer = nn.Linear(1, 1, bias=False)
    else:
        layer = SwitchLinear(1, 1, 1, bias=False)
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
