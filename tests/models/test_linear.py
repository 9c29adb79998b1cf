"""A linear layer that keeps its transpose gives what MLX's own does, and holds no weight twice."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from pagedmlx.models.linear import TransposedLinear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(12,), (1, 12), (5, 1, 12), (2, 3, 12)])
def test_outputs_are_those_of_a_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    mx.random.seed(0)
    plain = nn.Linear(12, 7, bias=bias)
    layer = TransposedLinear(**plain.parameters())
    x = mx.random.normal(shape)
    np.testing.assert_array_equal(np.array(layer(x)), np.array(plain(x)))
    assert layer.parameters().keys() == plain.parameters().keys()


def test_the_transpose_takes_no_memory() -> None:
    weight = mx.random.normal((1024, 512))
    mx.eval(weight)
    before = mx.get_active_memory()
    layer = TransposedLinear(weight)
    mx.eval(layer(mx.ones((3, 512))))
    assert mx.get_active_memory() - before < weight.nbytes // 8
