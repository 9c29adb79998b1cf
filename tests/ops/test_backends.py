from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedmlx.errors import InvalidRequestError
from pagedmlx.kv.layout import AxisOrder
from pagedmlx.ops import make_backend
from pagedmlx.ops.base import AttentionBackend, AttentionParams
from tests.support.attention import make_case, with_fresh_batch

CONTEXT_LENS = (1, 15, 16, 17, 31, 33, 255, 256, 257)
MIXED = ((0, 1), (15, 1), (300, 1), (16, 1), (0, 5), (30, 3), (255, 33))
PLAIN = AttentionParams(scale=0.3)


@pytest.fixture(params=["reference", "gather"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return make_backend(request.param)


@pytest.mark.parametrize("fill", [float("nan"), 1e4])
@pytest.mark.parametrize("context_len", CONTEXT_LENS)
def test_decode_and_prefill_agree_with_float64_at_block_edges(
    backend: AttentionBackend, context_len: int, fill: float
) -> None:
    make_case([(context_len - 1, 1), (0, context_len)], fill=fill).check(backend, PLAIN)


@pytest.mark.parametrize("block_size", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("order", AxisOrder)
def test_mixed_batches_agree_for_every_block_size_and_axis_order(
    backend: AttentionBackend, block_size: int, order: AxisOrder
) -> None:
    make_case(MIXED, block_size=block_size, order=order).check(backend, PLAIN)


@pytest.mark.parametrize("factor", [1, 3, 8])
@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        AttentionParams(scale=0.3, window=1),
        AttentionParams(scale=0.3, window=16),
        AttentionParams(scale=0.3, window=19),
        AttentionParams(scale=0.3, window=10_000),
        AttentionParams(scale=0.3, softcap=0.7),
        AttentionParams(scale=0.3, softcap=0.7, window=19),
    ],
    ids=str,
)
def test_windows_and_softcap_hold_for_any_group_of_query_heads(
    backend: AttentionBackend, factor: int, params: AttentionParams
) -> None:
    make_case(MIXED, factor=factor).check(backend, params)


@pytest.mark.parametrize("window", [None, 19])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("factor", [1, 3])
def test_sinks_take_their_share_of_the_softmax(
    backend: AttentionBackend, factor: int, softcap: float | None, window: int | None
) -> None:
    sinks = mx.array(np.linspace(-2.0, 3.0, 2 * factor, dtype=np.float32))
    params = AttentionParams(scale=0.3, window=window, softcap=softcap, sinks=sinks)
    make_case(MIXED, factor=factor).check(backend, params)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dims", [(8, 8), (24, 16), (16, 24)])
def test_every_type_and_unequal_head_sizes_agree(
    backend: AttentionBackend, dtype: str, head_dims: tuple[int, int]
) -> None:
    case = make_case(MIXED, dtype=dtype, k_head_dim=head_dims[0], v_head_dim=head_dims[1], factor=2)
    sinks = mx.zeros(4)
    for params in (PLAIN, AttentionParams(scale=0.3, sinks=sinks), _all_of_it()):
        case.check(backend, params)


def test_the_output_has_the_type_of_the_queries(backend: AttentionBackend) -> None:
    case = make_case(MIXED, dtype="float16")
    queries = case.queries.astype(mx.float32)
    output = backend.attend(queries, 0, 0, case.store, case.batch, PLAIN)
    assert output.dtype == mx.float32
    np.testing.assert_allclose(np.array(output), case.expected(PLAIN), rtol=4e-3, atol=4e-3)


def test_unequal_lengths_in_one_batch_come_back_in_their_own_rows(
    backend: AttentionBackend,
) -> None:
    spans = [(length - 1, 1) for length in (7, 1500, 3, 900, 1490, 40, 650, 1)]
    make_case([*spans, (700, 2)]).check(backend, PLAIN)
    make_case(spans).check(backend, AttentionParams(scale=0.3, window=700))


@pytest.mark.parametrize("edge", [1024, 4096])
def test_long_contexts_agree_around_the_lengths_where_gpu_kernels_switch(
    backend: AttentionBackend, edge: int
) -> None:
    spans = [(length - 1, 1) for length in range(edge - 2, edge + 3)]
    make_case([*spans, (edge - 3, 5)], factor=4).check(backend, PLAIN)


def test_a_backend_follows_from_one_batch_to_the_next(backend: AttentionBackend) -> None:
    first, second = make_case(MIXED, seed=1), make_case([(40, 1), (0, 9)], seed=2)
    for case in (first, second, with_fresh_batch(first)):
        case.check(backend, PLAIN)
        case.check(backend, AttentionParams(scale=0.3, window=6))


@settings(max_examples=25)
@given(data=st.data())
def test_random_batches_agree_with_float64(data: st.DataObject) -> None:
    draw = data.draw
    decodes = draw(st.lists(st.tuples(st.integers(0, 90), st.just(1)), max_size=5))
    chunks = draw(
        st.lists(
            st.tuples(st.integers(0, 60), st.integers(2, 20)),
            min_size=0 if decodes else 1,
            max_size=3,
        )
    )
    case = make_case(
        [*decodes, *chunks],
        block_size=draw(st.sampled_from([2, 4, 8, 16])),
        num_kv_heads=draw(st.integers(1, 3)),
        factor=draw(st.integers(1, 4)),
        k_head_dim=draw(st.sampled_from([4, 8])),
        v_head_dim=draw(st.sampled_from([4, 8])),
        order=draw(st.sampled_from(AxisOrder)),
        seed=draw(st.integers(0, 1000)),
    )
    num_heads = case.queries.shape[1]
    params = AttentionParams(
        scale=0.4,
        window=draw(st.none() | st.integers(1, 70)),
        softcap=draw(st.none() | st.just(1.5)),
        sinks=draw(st.none() | st.just(mx.ones(num_heads))),
    )
    for name in ("reference", "gather"):
        case.check(make_backend(name), params)


def test_auto_is_the_fastest_here_and_an_unknown_backend_is_refused_by_name() -> None:
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    assert make_backend("auto").name == ("kernels" if on_gpu else "gather")
    with pytest.raises(InvalidRequestError, match="'magic' must be auto, kernels, gather or"):
        make_backend("magic")


def _all_of_it() -> AttentionParams:
    return AttentionParams(scale=0.3, window=19, softcap=0.7, sinks=mx.ones(4))
