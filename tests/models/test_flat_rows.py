"""Rows that know their flat form are arrays like any other, and cost MLX's graph fewer nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from pagedmlx.models.flat_rows import FlatRows, RowsNorm, flat_rows, keep_rows_flat
from pagedmlx.models.fused import fuse_projections
from pagedmlx.models.hook import install_hook
from pagedmlx.models.linear import TransposedLinear
from pagedmlx.models.residual import add_in_products
from tests.support.graphs import operations
from tests.support.tiny_models import CONFIGS, GATHERED, HYBRID, tiny_model

VIEWS = {"Reshape", "Flatten", "Unflatten", "Transpose", "ExpandDims", "Squeeze", "AsType"}


def num_views(*outputs: mx.array) -> int:
    graph = operations(*outputs)
    return sum(graph[name] for name in VIEWS)


def flat_array(rows: int = 3, size: int = 8) -> mx.array:
    flat = mx.random.normal((rows, size), key=mx.random.key(0))
    mx.eval(flat)
    return flat


def changed(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A way that changes an array in place and then looks at it in another shape."""

    def way(x: Any) -> Any:
        x = change(x)
        return x.reshape(-1, 4) + flat_rows(x).reshape(-1, 4)

    return way


def added(x: Any) -> Any:
    x += 1
    return x


def written(x: Any) -> Any:
    x[0] = 7
    return x


def multiplied(x: Any) -> Any:
    x @= mx.full((8, 8), 0.5)
    return x


WAYS: dict[str, Callable[[Any], Any]] = {
    "as heads": lambda x: x.reshape(3, 1, 2, -1).transpose(0, 2, 1, 3),
    "heads and back": lambda x: x.reshape(3, 1, 2, 4).swapaxes(1, 2).swapaxes(2, 1).reshape(3, 8),
    "a tuple of axes": lambda x: x.reshape((3, 1, 4, 2)).transpose((0, -2, 1, -1)),
    "axes that do move": lambda x: x.reshape(3, 2, 4).transpose(0, 2, 1).reshape(3, 1, 8),
    "rows that move": lambda x: x.transpose(2, 1, 0),
    "rows and columns that swap": lambda x: x.swapaxes(0, -1).reshape(-1),
    "no axes": lambda x: x.transpose(),
    "another number of rows": lambda x: x.reshape(6, 4),
    "through mx": lambda x: mx.transpose(mx.reshape(x, (3, 2, 4)), (1, 0, 2)),
    "a part": lambda x: x.reshape(3, 1, 2, 4)[:, :, 1].transpose(1, 0, 2),
    "a sum": lambda x: (x + x.reshape(3, 8)[:, None]).reshape(-1),
    "added to in place": changed(added),
    "written into": changed(written),
    "a matrix in place": changed(multiplied),
    "a view of it changed": lambda x: written(x.reshape(3, 8)) + flat_rows(x),
    "changed after a view": lambda x: [x.reshape(3, 8), added(x)][0] + flat_rows(x),
    "a norm": lambda x: norm(mx.float32)(x).reshape(3, 8),
    "a norm of heads": lambda x: norm(mx.float32, 4)(x.reshape(3, 1, 2, 4)).transpose(0, 2, 1, 3),
    "a product": lambda x: TransposedLinear(mx.ones((6, 8)))(x).reshape(3, 6),
}


def norm(dtype: mx.Dtype, size: int = 8) -> RowsNorm:
    layer = RowsNorm(size, eps=1e-3)
    layer.weight = mx.arange(size).astype(dtype)
    return layer


@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_done_with_rows_is_right(way: str) -> None:
    flat = flat_array()
    plain = mx.array(flat).reshape(3, 1, 8)
    found, expected = WAYS[way](FlatRows(flat, (3, 1, 8))), WAYS[way](plain)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(np.array(found), np.array(expected))
    np.testing.assert_array_equal(np.array(flat), np.array(flat_array()))


@given(st.data())
def test_axes_in_any_order_are_right(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=5)))
    order = data.draw(st.permutations(range(len(shape))))
    flat = mx.arange(int(np.prod(shape)))[None]
    found = FlatRows(flat, shape).transpose(order)
    expected = np.arange(flat.size).reshape(shape).transpose(order)
    np.testing.assert_array_equal(np.array(found), expected)
    np.testing.assert_array_equal(np.array(found.reshape(-1)), expected.reshape(-1))


@pytest.mark.parametrize(
    "way",
    [
        lambda x: x.reshape(5),
        lambda x: x.reshape(-1, -1),
        lambda x: x.transpose(0, 1),
        lambda x: x[:1].reshape(1, 1, 8).transpose(0, 0, 2),
        lambda x: x.transpose(1, 1, 2),
        lambda x: x.transpose(0, 1, 3),
        lambda x: x.swapaxes(0, 3),
    ],
)
def test_what_is_wrong_is_said_by_mlx(way: Callable[[Any], Any]) -> None:
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        way(FlatRows(flat_array(), (3, 1, 8)))


def test_a_single_element_may_have_no_axes() -> None:
    one = FlatRows(flat_array(1, 1), (1, 1, 1))
    assert one.reshape(()).shape == one.reshape([]).shape == ()
    assert one.reshape(()).item() == one.item()


def test_axes_may_be_an_array() -> None:
    x = FlatRows(flat_array(), (3, 1, 8)).transpose(np.array([1, 0, 2]))
    assert x.shape == (1, 3, 8)


@pytest.mark.parametrize("rows", [1, 3])
def test_views_of_views_are_one_node(rows: int) -> None:
    flat = flat_array(rows) * 2
    x = FlatRows(flat, (rows, 1, 8))
    assert num_views(x) == 1
    heads = x.reshape(rows, 1, 2, 4).transpose(0, 2, 1, 3)
    assert num_views(heads) == 1
    assert num_views(flat_rows(heads.transpose(0, 2, 1, 3).reshape(rows, 1, 8))) == 0
    assert flat_rows(x) is flat
    assert num_views(TransposedLinear(mx.ones((8, 8)))(x)) == 1


def test_the_rows_of_an_array_are_another_object() -> None:
    """Who keeps them doesn't see what is done to the array in place."""
    flat = flat_array()
    assert flat_rows(flat) is not flat
    assert num_views(flat_rows(flat)) == 0


@pytest.mark.parametrize("shape", [(8,), (3, 8), (1, 3, 8), (3, 1, 8), (2, 3, 8), (0, 1, 8)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_a_norm_is_mlx_own(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    x = mx.random.normal(shape, key=mx.random.key(1)).astype(dtype)
    found, expected = norm(dtype)(x), nn.RMSNorm.__call__(norm(dtype), x)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert mx.array_equal(found, expected)


def test_only_norms_that_are_mlx_own_are_changed() -> None:
    class Other(nn.RMSNorm):
        """It does something else."""

    model: Any = nn.Module()
    model.norm, model.other, model.layer = nn.RMSNorm(8), Other(8), nn.LayerNorm(8)
    weights = dict(model.parameters())
    keep_rows_flat(model)
    keep_rows_flat(model)
    assert [type(each) for each in (model.norm, model.other, model.layer)] == [
        RowsNorm,
        Other,
        nn.LayerNorm,
    ]
    assert model.parameters().keys() == weights.keys()


@pytest.mark.parametrize("name", [*sorted(CONFIGS), *GATHERED, *HYBRID])
@pytest.mark.parametrize("shape", [(1, 9), (1, 1)], ids=str)
def test_a_model_gives_the_very_same(name: str, shape: tuple[int, int]) -> None:
    def logits(keeps: bool) -> mx.array:
        model: Any = tiny_model(name).model
        if keeps:
            keep_rows_flat(model)
        tokens = (mx.arange(shape[1]) + 5)[None]
        return model(tokens, cache=make_prompt_cache(model))

    with install_hook(tiny_model(name).model):
        assert mx.array_equal(logits(True), logits(False), equal_nan=True)


def test_between_the_parts_of_a_layer_rows_stay_flat() -> None:
    """What kernels take of a layer's rows and what they give it needs no view."""

    def views(num_layers: int) -> int:
        model: Any = llama.Model(
            llama.ModelArgs(
                model_type="llama",
                hidden_size=32,
                num_hidden_layers=num_layers,
                intermediate_size=48,
                num_attention_heads=4,
                num_key_value_heads=2,
                rms_norm_eps=1e-5,
                vocab_size=64,
            )
        )
        mx.eval(model.parameters())
        for layer in model.layers:
            layer.self_attn.rope = lambda x, **_: x  # the kernel that writes does it
        fuse_projections(model)
        keep_rows_flat(model)
        add_in_products(model)
        with install_hook(model):
            caches = [HeadsCache() for _ in range(num_layers)]
            return num_views(model(mx.arange(3)[:, None], cache=caches))

    assert views(5) == views(4)


class HeadsCache:
    """Gives what kernels would, but for the numbers."""

    offset = mx.zeros(3, mx.int32)

    def make_mask(self, *_: Any, **__: Any) -> None:
        """None."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.stored = keys, values
        return keys, values

    def attend_blocks(self, queries: mx.array, *_: Any) -> mx.array:
        num_rows, num_heads, _, size = queries.shape
        flat, *stored = (each.reshape(num_rows, -1) for each in (queries, *self.stored))
        return FlatRows(flat + mx.concatenate(stored, axis=1), (num_rows, num_heads, 1, size))
