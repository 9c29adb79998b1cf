"""Each fault that the strict check promises to find is planted, beside a clean twin."""

import numpy as np
import pytest

from tests.metal.check import MAX_BUFFERS, check
from tests.metal.example import Example, arange
from tests.metal.execute import Output

HEADER = """
template <typename P>
METAL_FUNC P first(const device P* from) { return from[0]; }
template <int N>
METAL_FUNC void clear(thread float (&values)[N]) { for (int i = 0; i < N; ++i) values[i] = 0.0f; }
"""

CLEAN = {
    "vector loads, vectors made from parts, swizzles": """
        const device uint4* words = reinterpret_cast<const device uint4*>(x);
        const float4 a = float4(x[0], x[1], float2(2.0f));
        float4 b = float4(1.0f);
        b.xy = a.zw;
        out[0] = dot(a, b) + as_type<float>(words[0].x);""",
    "pointers with their address spaces": """
        thread float mine[4];
        clear(mine);
        thread float* p = mine;
        const device float* q = x;
        out[0] = p[0] + first(q);""",
    "a cast that stays in its address space": "out[0] = float(((const device uint*)x)[0]);",
    "stores through const_cast": "const_cast<device float*>(x)[0] = 1.0f;",
    "threadgroup memory": """
        threadgroup float shared[32];
        threadgroup float one;
        shared[0] = x[0];
        one = shared[0];
        out[0] = one;""",
    "explicit conversions": "out[0] = float(bfloat16_t(float(half(x[0]))));",
    "matrices": """
        threadgroup half tile[64];
        simdgroup_matrix<half, 8, 8> a;
        simdgroup_matrix<float, 8, 8> c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        simdgroup_load(a, tile, 8);
        simdgroup_multiply_accumulate(c, a, a, c);
        simdgroup_store(c, out, 8);""",
}


@pytest.mark.parametrize("name", CLEAN)
def test_accepts(name):
    report = check(Example(CLEAN[name], HEADER).source())
    assert not report.errors


FAULTS = {
    "device pointer to threadgroup memory": (
        "threadgroup float s[4]; const device float* p = s; out[0] = p[0];",
        "cannot initialize",
    ),
    "device pointer to constant memory": (
        "const device int* p = x_shape; out[0] = float(p[0]);",
        "cannot initialize",
    ),
    "cast across address spaces, C style": (
        "threadgroup float s[4]; out[0] = ((const device float*)s)[0];",
        "another address space",
    ),
    "cast across address spaces": (
        "threadgroup float s[4]; out[0] = reinterpret_cast<const device float*>(s)[0];",
        "not allowed",
    ),
    "argument of another address space": (
        "threadgroup float s[4]; out[0] = first(s);",
        "no matching function",
    ),
    "pointer without address space": (
        "float mine[4]; float* p = mine; out[0] = p[0];",
        "a pointer without address space",
    ),
    "reference without address space": (
        "float mine = x[0]; float& r = mine; out[0] = r;",
        "a reference without address space",
    ),
    "store through const": ("x[0] = 1.0f;", "not assignable"),
    "unknown function": ("out[0] = sinpie(x[0]);", "undeclared"),
    "ambiguous overload": ("out[0] = max(x[0], 0);", "ambiguous"),
    "double": ("double d = x[0]; out[0] = float(d);", "no_double"),
    "implicit conversion to bfloat": (
        "bfloat16_t b = bfloat16_t(0.0f); b = x[0]; out[0] = float(b);",
        "loses floating-point precision",
    ),
    "narrowing in braces": ("int2 v = {x[0], 1}; out[0] = float(v.x);", "narrowed"),
    "SIMD-group operation on 64 bits": (
        "out[0] = float(simd_sum(long(x[0])));",
        "no 64-bit SIMD-group operations",
    ),
    "matrix loaded from another type": (
        "simdgroup_matrix<half, 8, 8> a; simdgroup_load(a, x, 8); out[0] = a.thread_elements()[0];",
        "element types differ",
    ),
    "threadgroup variable in an inner block": (
        "if (x[0] > 0.0f) { threadgroup float s[4]; s[0] = 1.0f; out[0] = s[0]; }",
        "outer block",
    ),
    "threadgroup variable with a value": (
        "threadgroup float s = 1.0f; out[0] = s;",
        "outer block",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_refuses(name):
    body, message = FAULTS[name]
    report = check(Example(body, HEADER).source())
    assert message in " ".join(d.message for d in report.errors)


def test_refuses_a_helper_that_mlx_has_already():
    helper = "template <typename T, typename U>\ninline T {}(T n, U m) {{ return n / m; }}"
    assert not check(Example("out[0] = x[0];", helper.format("quotient")).source()).errors
    errors = check(Example("out[0] = x[0];", helper.format("ceildiv")).source()).errors
    assert "redefinition" in errors[0].message


def test_error_names_its_line_of_the_source():
    source = Example("\n\nout[0] = sinpie(x[0]);").source()
    (error,) = check(source).errors
    assert "sinpie" in source.splitlines()[error.line - 1]


def test_small_form_of_an_array_is_checked_as_constant():
    body = "const device float* p = x; out[0] = p[0];"
    assert not check(Example(body, inputs={"x": arange(8)}).source()).errors
    assert check(Example(body, inputs={"x": arange(7)}).source()).errors


@pytest.mark.parametrize(("floats", "fits"), [(8192, True), (8193, False)])
def test_threadgroup_memory_is_summed_and_limited(floats, fits):
    body = f"""
        threadgroup float a[{floats - 100}];
        threadgroup float b[10][10];
        a[0] = b[0][0] = x[0];
        out[0] = a[0];"""
    report = check(Example(body).source())
    assert report.threadgroup_bytes == 4 * floats
    assert (not report.errors) == fits


@pytest.mark.parametrize(("count", "fits"), [(MAX_BUFFERS - 1, True), (MAX_BUFFERS, False)])
def test_number_of_buffers_is_limited(count, fits):
    inputs = {f"x{i}_": arange(8) for i in range(count)}
    report = check(Example("out[0] = x0_[0];", inputs=inputs).source())
    assert report.num_buffers == count + 1
    assert (not report.errors) == fits


def test_size_of_the_source_is_limited():
    source = Example("out[0] = x[0];" + "\n// a word" * 100).source()
    assert not check(source).errors
    assert check(source, max_source_bytes=1000).errors


def test_warns_of_a_literal_that_is_a_double_in_cuda():
    report = check(Example("out[0] = x[0] * 1.5; // 2.5\nout[1] = 1.5f;").source())
    assert [d.message for d in report.diagnostics] == ["1.5 is a double where doubles exist"]
    assert not report.errors


def test_warns_of_an_implicit_conversion_to_half():
    half = Output((64,), np.dtype(np.float16))
    report = check(Example("out[0] = x[0];", out=half).source())
    assert not report.errors
    assert "loses floating-point precision" in report.diagnostics[0].message
