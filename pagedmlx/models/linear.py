"""TransposedLinear: a linear layer whose product is one step of MLX's graph less."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


class TransposedLinear(nn.Module):
    """``nn.Linear`` that keeps its weight's transpose, a view, instead of asking for it each time.

    Args:
        weight: (output size, input size), evaluated and final: one that is set later isn't used.
        bias: (output size,) or None.
    """

    def __init__(self, weight: mx.array, bias: mx.array | None = None) -> None:
        super().__init__()
        self.weight = weight
        if bias is not None:
            self.bias = bias
        self._transposed = weight.T
        mx.eval(self._transposed)

    def __call__(self, x: mx.array) -> mx.array:
        """Multiply with the weights; (..., input size) to (..., output size)."""
        if "bias" in self:
            return mx.addmm(self.bias, x, self._transposed)
        return x @ self._transposed
