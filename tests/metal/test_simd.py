"""SIMD-group operations, matrices and number formats give what numpy says they should."""

import mlx.core as mx
import numpy as np
import pytest

from tests.metal.example import Example, arange
from tests.metal.execute import Output
from tests.metal.launcher import as_numpy, from_numpy

FLOAT = np.dtype(np.float32)
HALF = np.dtype(np.float16)
BITS = np.dtype(np.uint16)

X = np.random.default_rng(0).standard_normal(64).astype(np.float32)
ROWS = X.reshape(2, 32)
LANES = np.arange(32)


def per_simdgroup(values: np.ndarray) -> np.ndarray:
    return np.repeat(values, 32)


OPERATIONS = {
    "simd_sum(v)": per_simdgroup(ROWS.astype(float).sum(1)),
    "simd_product(v)": per_simdgroup(ROWS.astype(float).prod(1)),
    "simd_min(v)": per_simdgroup(ROWS.min(1)),
    "simd_max(v)": per_simdgroup(ROWS.max(1)),
    "simd_prefix_inclusive_sum(v)": ROWS.astype(float).cumsum(1).ravel(),
    "simd_prefix_exclusive_sum(v)": (ROWS.astype(float).cumsum(1) - ROWS).ravel(),
    "simd_shuffle(v, ushort(31 - lane))": ROWS[:, ::-1].ravel(),
    "simd_shuffle_xor(v, 5)": ROWS[:, LANES ^ 5].ravel(),
    "simd_shuffle_down(v, 3)": ROWS[:, np.where(LANES + 3 < 32, LANES + 3, LANES)].ravel(),
    "simd_shuffle_up(v, 3)": ROWS[:, np.where(LANES >= 3, LANES - 3, LANES)].ravel(),
    "simd_broadcast(v, 7)": per_simdgroup(ROWS[:, 7]),
    "simd_broadcast_first(v)": per_simdgroup(ROWS[:, 0]),
    "quad_sum(v)": np.repeat(ROWS.reshape(2, 8, 4).sum(2), 4),
    "float(simd_any(v > 1.5f))": per_simdgroup((ROWS > 1.5).any(1)),
    "float(simd_all(v > -1.0f))": per_simdgroup((ROWS > -1).all(1)),
    "float(ulong(simd_ballot(lane < 5)))": np.full(64, 31.0),
    "simd_sum(float2(v, 2.0f * v)).y": per_simdgroup(2 * ROWS.astype(float).sum(1)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_simdgroup_operation(operation):
    body = f"""
        const uint lane = thread_index_in_simdgroup;
        const float v = x[thread_position_in_grid.x];
        out[thread_position_in_grid.x] = {operation};"""
    out = Example(body, inputs={"x": X}).out_of()
    np.testing.assert_allclose(out, OPERATIONS[operation], rtol=1e-5, atol=1e-6)


TILES = """
    simdgroup_matrix<{T}, 8, 8> a, b;
    simdgroup_matrix<float, 8, 8> c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    threadgroup {T} tile[64];
    const uint lane = thread_index_in_simdgroup;
    for (uint i = lane; i < 64; i += 32) tile[i] = y[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(a, x, 16, ulong2(8, 1));
    simdgroup_load(b, tile, 8, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_store(c, out, 8);"""


@pytest.mark.parametrize(("name", "dtype"), [("float", FLOAT), ("half", HALF)])
@pytest.mark.parametrize("seed", range(3))
def test_matrix_product_of_tiles(name, dtype, seed):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, 16)).astype(dtype)
    y = rng.standard_normal((8, 8)).astype(dtype)
    tiles = Example(
        TILES.replace("{T}", name), inputs={"x": x, "y": y}, out=Output((8, 8), FLOAT), threads=32
    )
    expected = 1 + x[1:9, 8:].astype(float) @ y.astype(float).T
    np.testing.assert_allclose(tiles.out_of(seed), expected, rtol=1e-5, atol=1e-5)


def test_lanes_hold_two_neighbours_of_a_row():
    body = """
        simdgroup_matrix<float, 8, 8> a;
        simdgroup_load(a, x, 8);
        out[2 * thread_index_in_simdgroup] = a.thread_elements()[0];
        out[2 * thread_index_in_simdgroup + 1] = a.thread_elements()[1];"""
    out = Example(body, inputs={"x": arange(64)}, threads=32).out_of()
    rows = ((LANES & 16) >> 2) | ((LANES >> 1) & 3)
    columns = ((LANES & 8) >> 1) | ((LANES & 1) << 1)
    np.testing.assert_array_equal(out.reshape(32, 2)[:, 0], 8 * rows + columns)
    np.testing.assert_array_equal(out.reshape(32, 2)[:, 1], 8 * rows + columns + 1)


def test_a_matrix_of_one_number_is_diagonal():
    body = "simdgroup_matrix<float, 8, 8> a(3.0f); simdgroup_store(a, out, 8);"
    out = Example(body, threads=32).out_of()
    np.testing.assert_array_equal(out.reshape(8, 8), 3 * np.eye(8))


EVERY_16_BITS = np.arange(1 << 16, dtype=np.uint16)
EVERY = f"""
    for (uint i = thread_position_in_grid.x; i < {1 << 16}; i += 1024) out[i] = {{}};"""


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.all((a == b) | (np.isnan(a) & np.isnan(b))))


def test_half_is_read_as_numpy_reads_it():
    x = EVERY_16_BITS.view(np.float16)
    out = Output((1 << 16,), FLOAT)
    example = Example(EVERY.format("float(x[i])"), inputs={"x": x}, out=out, threads=1024)
    assert same(example.out_of(), x.astype(np.float32))


def test_bfloat_is_read_as_mlx_reads_it():
    out = Output((1 << 16,), FLOAT)
    example = Example(
        EVERY.format("float(x[i])"),
        inputs={"x": EVERY_16_BITS},
        out=out,
        threads=1024,
        bfloat16=("x",),
    )
    expected = np.array(from_numpy(EVERY_16_BITS, mx.bfloat16).astype(mx.float32))
    assert same(example.out_of(), expected)


# Every float that lies on, just above and just below the middle of two halves, and others.
FLOATS = np.concatenate(
    [
        np.nextafter(
            np.arange(0, 1 << 31, 1 << 16, dtype=np.uint32).view(np.float32)[:16384],
            np.float32(step),
        )
        for step in (np.inf, 0)
    ]
    + [
        np.arange(0, 1 << 27, 1 << 12, dtype=np.uint32)[:16384].view(np.float32) + np.float32(0),
        (np.random.default_rng(2).standard_normal(16384) * 1e4).astype(np.float32),
    ]
)


def test_half_is_rounded_as_numpy_rounds_it():
    out = Output((1 << 16,), HALF)
    example = Example(EVERY.format("half(x[i])"), inputs={"x": FLOATS}, out=out, threads=1024)
    with np.errstate(over="ignore"):
        assert same(example.out_of(), FLOATS.astype(np.float16))


def test_bfloat_is_rounded_as_mlx_rounds_it():
    example = Example(
        EVERY.format("bfloat16_t(x[i])"),
        inputs={"x": FLOATS},
        out=Output((1 << 16,), BITS),
        threads=1024,
        bfloat16=("out",),
    )
    expected = as_numpy(mx.array(FLOATS).astype(mx.bfloat16))
    np.testing.assert_array_equal(example.out_of(), expected)


def test_half_arithmetic_rounds_after_every_operation():
    x = np.random.default_rng(3).standard_normal(64).astype(np.float16)
    body = "const uint i = thread_position_in_grid.x; out[i] = x[i] * x[63 - i] + x[i];"
    out = Example(body, inputs={"x": x}, out=Output((64,), HALF)).out_of()
    np.testing.assert_array_equal(out, x * x[::-1] + x)
