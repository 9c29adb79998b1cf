"""The package's kernels: every variant under the strict check, a covering set of them executed."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.kv.layout import AxisOrder
from pagedmlx.ops.base import AttentionParams
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend, unsupported
from pagedmlx.ops.variants import PoolShape
from tests.metal.cases import FIRST, Variant, covering_variants, every_variant
from tests.metal.check import Report, check
from tests.metal.cuda_map import with_cuda_map
from tests.metal.launcher import FiberLauncher, RecordingLauncher
from tests.metal.source import parse
from tests.support.attention import make_case, planned_ahead, to_numpy, write_step

# Of the tolerance that the GPU is given: sums here are as exact as float32 is.
MAX_DEVIATION = 0.25


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "executed" in metafunc.fixturenames:
        full = metafunc.config.getoption("--metal-full")
        variants = every_variant() if full else covering_variants()
        metafunc.parametrize("executed", variants, ids=str)


@pytest.mark.parametrize("head_dims", FIRST["head_dims"], ids=str)
def test_every_variant_passes_the_strict_check(head_dims, count: Counter[str]):
    recorder = RecordingLauncher()
    variants = [variant for variant in every_variant() if variant.head_dims == head_dims]
    checks: dict[str, Future[Report]] = {}
    with ThreadPoolExecutor(2) as pool:
        for variant in variants:
            case = variant.make_case(recorder)
            case.attend(variant.backend(recorder), variant.params())
            # clang works while the next ones are generated.
            for source in recorder.sources.keys() - checks.keys():
                checks[source] = pool.submit(check, source)
    reports = {source: each.result() for source, each in checks.items()}
    for source, kernel in recorder.sources.items():
        report = reports[source]
        assert not report.diagnostics, kernel.name
        assert report.threadgroup_bytes == kernel.threadgroup_bytes, kernel.name
    count["variants of attention checked"] += len(variants)
    count["distinct sources checked"] += len(reports)


def test_executed_variant_gives_the_answer(executed: Variant, count: Counter[str]):
    launcher = FiberLauncher()
    assert executed.deviation(launcher) < MAX_DEVIATION
    if executed.window is None:
        assert any("merge" in name for name in launcher.executed) == executed.split
    count["variants of attention executed"] += 1
    count["launches executed"] += sum(launcher.executed.values())


SMALL = Variant(
    dtype="float16",
    head_dims=(64, 64),
    block_size=8,
    factor=2,
    rows=1,
    split=False,
    num_kv_heads=2,
    order=AxisOrder.HEAD_MAJOR,
    window=None,
    softcap=None,
    sinks=True,
    chunks=3,
)


def test_both_forms_of_a_small_array_are_checked():
    recorder = RecordingLauncher()
    for factor in (2, 4):
        variant = replace(SMALL, factor=factor)
        variant.make_case(recorder).attend(variant.backend(recorder), variant.params())
    spaces = {
        buffer.space
        for source in recorder.sources
        for buffer in parse(source).buffers
        if buffer.name == "sinks"
    }
    assert spaces == {"constant", "device"}
    assert not any(check(source).errors for source in recorder.sources)


@pytest.mark.parametrize("head_dims", [(8, 8), (12, 20), (72, 40), (324, 100)], ids=str)
@pytest.mark.parametrize("split", [False, True])
def test_any_multiple_of_four_is_a_head_size(head_dims, split):
    variant = replace(SMALL, head_dims=head_dims, split=split, dtype="bfloat16")
    assert variant.deviation(FiberLauncher()) < MAX_DEVIATION


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_row_of_the_smallest_head_passes_the_strict_check(dtype):
    smallest = next(
        size for size in range(4, 64) if unsupported(PoolShape(dtype, 1, size, size, 16), 1) is None
    )
    variant = replace(SMALL, dtype=dtype, head_dims=(smallest, smallest), num_kv_heads=1, factor=1)
    recorder = RecordingLauncher()
    variant.make_case(recorder).attend(variant.backend(recorder), variant.params())
    assert not any(check(source).errors for source in recorder.sources)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("decode", ["lanes", "matrices"])
def test_order_of_threads_changes_no_bit(decode, split, seed):
    variant = replace(SMALL, factor=8, split=split, decode=decode)
    outputs = [
        variant.make_case(launcher).attend(variant.backend(launcher), variant.params())
        for launcher in (FiberLauncher(), FiberLauncher(seed=1000 * (seed + 1)))
    ]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("decode", ["lanes", "matrices"])
def test_a_grid_rounded_up_as_in_cuda_harms_nothing(decode, rows):
    launcher = FiberLauncher(rounded=True)
    variant = replace(SMALL, factor=5, rows=rows, decode=decode)
    assert variant.deviation(launcher) < MAX_DEVIATION


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("split", [False, True])
def test_decode_by_matrices_holds_with_the_map_of_lanes_that_cuda_has(split, dtype):
    launcher = FiberLauncher(change=with_cuda_map)
    variant = replace(
        SMALL, dtype=dtype, head_dims=(80, 128), factor=7, rows=2, split=split, decode="matrices"
    )
    assert variant.deviation(launcher) < MAX_DEVIATION
    assert any("decode_matrix" in name for name in launcher.executed)


def test_chunks_that_depend_on_the_sequence_alone_give_the_answer():
    launcher = FiberLauncher()
    case = make_case(
        [(299, 1), (20, 1)],
        k_head_dim=64,
        v_head_dim=64,
        dtype="float32",
        writer=InPlaceWriter(launcher),
    )
    case.check(KernelBackend(launcher, deterministic=True), AttentionParams(scale=0.125))
    assert any("merge" in name for name in launcher.executed)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("decode", ["lanes", "matrices"])
def test_rows_of_padding_read_nothing_and_are_zeros(decode, split, sinks):
    launcher = FiberLauncher()
    variant = replace(SMALL, factor=5, split=split, decode=decode, sinks=sinks)
    # A sequence whose only token the launch itself writes comes first.
    case = make_case(
        [(0, 1), (299, 1)],
        factor=variant.factor,
        k_head_dim=64,
        v_head_dim=64,
        dtype="float16",
        writer=InPlaceWriter(launcher),
    )
    backend, params = variant.backend(launcher), variant.params()
    padded = planned_ahead(case, backend, params, num_padding=3)
    write_step(padded)
    launcher.executed.clear()
    output = padded.attend(backend, params)
    np.testing.assert_allclose(output[:2], case.expected(params), rtol=4e-3, atol=4e-3)
    assert not output[2:].any()
    words = {name.split("_")[1] for name in launcher.executed}
    assert words == ({"decode", "merge"} if split else {"decode"})


@pytest.mark.parametrize("spans", [[(64, 12)], [(40, 1), (299, 1), (64, 12), (33, 9)], [(30, 4)]])
def test_short_chunks_are_planned_ahead_with_padding_like_rows_that_decode(spans):
    launcher = FiberLauncher()
    case = make_case(
        spans,
        factor=2,
        k_head_dim=64,
        v_head_dim=64,
        dtype="float16",
        writer=InPlaceWriter(launcher),
    )
    backend, params = KernelBackend(launcher, 1 << 20, prefill="split"), AttentionParams(0.125)
    output = planned_ahead(case, backend, params, num_padding=3).attend(backend, params)
    np.testing.assert_allclose(output[:-3], case.expected(params), rtol=4e-3, atol=4e-3)
    assert not output[-3:].any()


def test_chunks_of_their_own_kernel_are_not_planned_ahead():
    launcher = FiberLauncher()
    case = make_case([(0, 20)], k_head_dim=64, v_head_dim=64, writer=InPlaceWriter(launcher))
    backend = KernelBackend(launcher, prefill="kernel")
    assert backend.plan_ahead(case.batch) is None, "no step has shown the layers"
    case.attend(backend, AttentionParams(0.125))
    assert backend.plan_ahead(case.batch) is None


@pytest.mark.parametrize("order", AxisOrder)
@pytest.mark.parametrize("window", [None, 20])
def test_prefill_beside_decode(window, order):
    launcher = FiberLauncher()
    case = make_case(
        [(40, 1), (7, 3), (16, 20)],
        block_size=16,
        factor=2,
        k_head_dim=64,
        v_head_dim=96,
        dtype="float32",
        order=order,
        writer=InPlaceWriter(launcher),
    )
    case.check(KernelBackend(launcher), AttentionParams(scale=0.125, window=window))
    assert any("gather" in name for name in launcher.executed)


@pytest.mark.parametrize("order", AxisOrder)
def test_copied_blocks_hold_what_their_source_held(order):
    launcher = FiberLauncher()
    case = make_case(
        [(40, 1)], k_head_dim=64, v_head_dim=80, dtype="bfloat16", order=order,
        writer=InPlaceWriter(launcher),
    )  # fmt: skip
    table = case.batch.host.groups[0].block_tables[0]
    free = sorted(set(range(case.store.num_blocks[0])) - set(table.tolist()))
    source, target = np.array([table[0]], np.int32), np.array([free[0]], np.int32)
    case.store.copy_blocks(0, source, target)
    case.store.commit()
    pool, _ = case.store.bind(0)
    for array in (pool.keys, pool.values):
        np.testing.assert_array_equal(
            to_numpy(array[mx.array(target)]), to_numpy(array[mx.array(source)])
        )
    assert any("copy_blocks" in name for name in launcher.executed)
