"""TransposedLinear: a linear layer whose product is but one node of MLX's graph."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from pagedmlx.models.flat_rows import FlatRows, flat_rows


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
        rows = flat_rows(x)
        product = (
            mx.addmm(self.bias, rows, self._transposed)
            if "bias" in self
            else rows @ self._transposed
        )
        return FlatRows(product, (*x.shape[:-1], product.shape[-1]))
