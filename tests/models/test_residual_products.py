"""A product that can add itself is right, whatever else is done with it."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.models.flat_rows import FlatRows
from pagedmlx.models.residual import AddingLinear, Product
from tests.support.graphs import operations


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_a_sum_is_rounded_once(dtype: mx.Dtype) -> None:
    weight, x, h = (
        mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
        for seed, shape in enumerate([(32, 48), (5, 1, 48), (5, 1, 32)])
    )
    found = h + AddingLinear(weight)(x)
    assert found.dtype == dtype
    exact = np.array(h.astype(mx.float32) + x.astype(mx.float32) @ weight.astype(mx.float32).T)
    rounded = mx.array(exact).astype(dtype).astype(mx.float32)
    # Where the exact sum lies near the middle of two numbers, either may be found.
    step = float(mx.finfo(dtype).eps) * np.abs(exact)
    assert (np.abs(np.array(found.astype(mx.float32)) - np.array(rounded)) <= step + 1e-6).all()


@pytest.mark.parametrize("shape", [(3, 8), (1, 3, 8), (3, 1, 8), (2, 2, 8), (0, 8), (2, 0, 8)])
def test_rows_may_lie_in_any_shape(shape: tuple[int, ...]) -> None:
    x, h = (mx.random.normal(shape, key=mx.random.key(seed)) for seed in range(2))
    weight = mx.random.normal((8, 8), key=mx.random.key(2))
    for found in (h + AddingLinear(weight)(x), AddingLinear(weight)(x) + h):
        assert found.shape == shape
        assert operations(found)["AddMM"] == 1
        np.testing.assert_allclose(np.array(found), np.array(h + x @ weight.T), atol=1e-5)


def other_type(p: Any, h: Any, x: Any) -> Any:
    return h.astype(mx.float16) + p


def twice(p: Any, h: Any, x: Any) -> Any:
    first = h + p
    return first + p + p


def added_to(p: Any, h: Any, x: Any) -> Any:
    p += h
    return h + p


def multiplied(p: Any, h: Any, x: Any) -> Any:
    q = p
    q *= 2
    return h + p


def subtracted(p: Any, h: Any, x: Any) -> Any:
    p -= h
    return p + h


def divided(p: Any, h: Any, x: Any) -> Any:
    p /= 3
    return h + p


def to_a_power(p: Any, h: Any, x: Any) -> Any:
    p **= 2
    p //= 0.5
    p %= 3
    return h + p


def by_a_matrix(p: Any, h: Any, x: Any) -> Any:
    p @= mx.full((8, 8), 0.5)
    return h + p


def written_into(p: Any, h: Any, x: Any) -> Any:
    p[..., 2:5] = 0
    return h + p


def seen_anew(p: Any, h: Any, x: Any) -> Any:
    p *= 2
    return p.reshape(-1, 4) + h.reshape(-1, 4)


def input_changed(p: Any, h: Any, x: Any) -> Any:
    x += 1
    return h + p


def stream_changed(p: Any, h: Any, x: Any) -> Any:
    total = h + p
    h += 1
    return total


def as_a_stream(p: Any, h: Any, x: Any) -> Any:
    h += p
    return h


WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "stream first": lambda p, h, x: h + p,
    "product first": lambda p, h, x: p + h,
    "mx.add": lambda p, h, x: mx.add(h, p),
    "two products": lambda p, h, x: p + p,
    "a product of it": lambda p, h, x: h + 0.5 * p,
    "a norm of it": lambda p, h, x: h + mx.fast.rms_norm(p, None, 1e-5),
    "a number": lambda p, h, x: (p + 1.5) + (2 + p),
    "one element": lambda p, h, x: h[..., :1] + p,
    "one row": lambda p, h, x: h[..., :1, :] + p,
    "more rows": lambda p, h, x: mx.stack([h, h]) + p,
    "an array with one element": lambda p, h, x: p + mx.array(2.0),
    "a sum": lambda p, h, x: sum([h, p, p]),
    "a difference": lambda p, h, x: (h - p) + (p - h) * p,
    "a part": lambda p, h, x: h[..., :4] + p[..., :4],
    "another shape": lambda p, h, x: h.reshape(-1) + p.reshape(-1),
    "the same type again": lambda p, h, x: h + p.astype(p.dtype),
    "another type": other_type,
    "more than once": twice,
    "added to in place": added_to,
    "multiplied in place": multiplied,
    "subtracted from in place": subtracted,
    "divided in place": divided,
    "powers in place": to_a_power,
    "a matrix in place": by_a_matrix,
    "written into": written_into,
    "in another shape after a change": seen_anew,
    "the input changed": input_changed,
    "the stream changed": stream_changed,
    "the stream in place": as_a_stream,
}


@pytest.mark.parametrize("shape", [(3, 8), (3, 1, 8), (1, 1, 8)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_done_with_a_product_is_right(way: str, shape: tuple[int, ...]) -> None:
    found, expected = both_ways(way, shape, lambda run: run)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "way", ["stream first", "two products", "multiplied in place", "the input changed"]
)
def test_it_can_be_compiled(way: str) -> None:
    found, expected = both_ways(way, (3, 1, 8), mx.compile)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_it_can_be_given_to_what_is_compiled() -> None:
    """Some models add to the residual stream in a compiled function."""
    x, h = (mx.random.normal((3, 8), key=mx.random.key(seed)) for seed in range(2))
    weight = mx.random.normal((8, 8), key=mx.random.key(2))
    add = mx.compile(lambda a, b: a + b, shapeless=True)
    found = add(h, AddingLinear(weight)(x))
    np.testing.assert_allclose(np.array(found), np.array(h + x @ weight.T), atol=1e-5)


def both_ways(
    way: str, shape: tuple[int, ...], wrap: Callable[[Any], Any]
) -> tuple[np.ndarray, np.ndarray]:
    """With a layer that adds and with a plain product."""
    weight = mx.random.normal((8, 8), key=mx.random.key(2))
    results: list[np.ndarray] = []
    for layer in (AddingLinear(weight), lambda x: x @ weight.T):

        def run(h: mx.array, x: mx.array, layer: Any = layer) -> mx.array:
            return WAYS[way](layer(x), h, x)

        h, x = (mx.random.normal(shape, key=mx.random.key(seed)) for seed in range(2))
        results.append(np.array(wrap(run)(h, x)))
    return results[0], results[1]


@pytest.mark.parametrize("other", [mx.float32, mx.float16], ids=str)
def test_weights_are_not_converted_to_the_type_of_a_stream(other: mx.Dtype) -> None:
    x = mx.ones((3, 8), mx.bfloat16)
    total = mx.ones((3, 8), other) + AddingLinear(mx.ones((8, 8), mx.bfloat16))(x)
    assert operations(total)["AddMM"] == 0
    assert total.dtype == mx.float32


def test_an_array_knows_of_every_change_in_place() -> None:
    """MLX may come to have more of them than those that are known here."""
    changes = {name for name in dir(mx.array) if re.fullmatch("__i[a-z]+__", name)}
    changes -= {"__init__", "__init_subclass__", "__index__", "__int__", "__invert__", "__iter__"}
    assert {*changes, "__setitem__"} <= set(vars(FlatRows))


def test_integers_can_be_changed_in_place() -> None:
    values = mx.array([[12, 5], [7, 9]])
    product = Product(values, values.shape, lambda other: other * 0)
    expected = mx.array(values)
    for each in (product, expected):
        each <<= 2
        each |= 1
        each ^= 3
        each &= 31
        each >>= 1
    assert mx.array_equal(product, expected)
    assert mx.array_equal(product + values, expected + values)


def test_products_of_several_layers_are_added_each_to_what_comes_before() -> None:
    first, second = AddingLinear(mx.ones((8, 8))), AddingLinear(mx.full((8, 8), 2.0))
    x = mx.ones((3, 8))
    total = mx.zeros((3, 8)) + first(x) + second(x)
    assert operations(total)["AddMM"] == 2
    assert mx.array_equal(total, mx.full((3, 8), 24.0))
    both = first(x) + second(x)
    graph = operations(both)
    assert (graph["AddMM"], graph["Matmul"], graph["Add"]) == (1, 1, 0)
    assert mx.array_equal(both, mx.full((3, 8), 24.0))


def test_nothing_of_an_input_is_kept() -> None:
    layer = AddingLinear(mx.ones((8, 8)))
    gc.collect()
    gc.disable()
    try:
        x, h = mx.ones((3, 8)), mx.ones((3, 8))
        gone = [weakref.ref(x), weakref.ref(h)]
        total = h + layer(x)
        del x, h
        assert [each() for each in gone] == [None, None]
        mx.eval(total)
        mx.synchronize()
        before = mx.get_active_memory()
        for _ in range(3):
            x = mx.ones((256, 8))
            mx.eval(mx.ones((256, 8)) + layer(x))
            layer(x)  # nobody adds it
            del x
        mx.synchronize()
        assert mx.get_active_memory() <= before
    finally:
        gc.enable()
