import mlx.core as mx
import numpy as np
import pytest

from tests.metal.example import Example, arange
from tests.metal.source import parse


def test_source_is_what_mlx_makes_signature_included():
    source = Example("out[thread_position_in_grid.x] = x[0] + float(x_shape[0]);").source()
    assert "const device float* x [[buffer(0)]]" in source
    assert "const constant int* x_shape [[buffer(1)]]" in source
    assert "uint3 thread_position_in_grid [[thread_position_in_grid]]" in source


@pytest.mark.parametrize(("elements", "space"), [(7, "constant"), (8, "device")])
def test_small_arrays_show_the_address_space_that_mlx_gives_them(elements, space):
    source = Example("out[0] = x[0];", inputs={"x": arange(elements)}).source()
    assert parse(source).buffers[0].space == space


def test_zero_dimensional_input_comes_as_a_reference():
    source = Example("out[0] = x;", inputs={"x": np.array(3, np.float32)}).source()
    assert not parse(source).buffers[0].pointer


def test_nothing_reaches_the_terminal(capfd):
    Example("out[0] = x[0];").source()
    mx.eval(mx.array(1.0))
    assert capfd.readouterr().out == ""


def test_text_that_mlx_did_not_make_is_refused():
    with pytest.raises(ValueError, match="0 kernels"):
        parse("kernel void f() {}")
