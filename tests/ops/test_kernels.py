"""KernelBackend on the executed Metal source: what it plans, and what it promises about bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.core.batch import BatchArrays
from pagedmlx.kv.layout import AxisOrder
from pagedmlx.ops.base import AttentionParams, PagedBatch
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend, unsupported
from pagedmlx.ops.launch import Platform
from pagedmlx.ops.prefill import prefill_variant
from pagedmlx.ops.variants import HEAD_DIMS, DecodeVariant, MergeVariant, PoolShape
from tests.metal.check import check
from tests.metal.launcher import FiberLauncher, RecordingLauncher
from tests.support.attention import make_case, write_step
from tests.support.batches import make_batch

PARAMS = AttentionParams(scale=0.125)
SPANS = [(40, 1), (299, 1), (0, 1), (90, 3), (600, 7)]


@pytest.mark.parametrize("wave", [1, 40, 1 << 20], ids=["whole", "wider", "cut"])
def test_however_the_work_is_cut_the_answer_stays(wave: int) -> None:
    launcher = FiberLauncher()
    case = make_case(SPANS, factor=4, k_head_dim=64, v_head_dim=64, writer=InPlaceWriter(launcher))
    case.check(KernelBackend(launcher, wave), PARAMS)


@pytest.mark.parametrize(
    "settings", [{}, {"sinks": True}, {"softcap": 20.0}, {"decode": "matrices"}]
)
def test_chunks_in_parts_give_the_answer_beside_others(settings: dict[str, Any]) -> None:
    launcher = FiberLauncher()
    spans = [(40, 1), (600, 40), (0, 30), (90, 3), (49, 17), (10, 20)]
    case = make_case(spans, factor=8, k_head_dim=64, v_head_dim=64, writer=InPlaceWriter(launcher))
    sinks = mx.array(np.linspace(-2.0, 3.0, 16, dtype=np.float32)) if "sinks" in settings else None
    params = AttentionParams(scale=0.125, sinks=sinks, softcap=settings.get("softcap"))
    decode = settings.get("decode", "lanes")
    for wave in (1, 1 << 20):
        backend = KernelBackend(launcher, wave, prefill="split", decode=decode)
        case.check(backend, params)


def test_rows_of_a_chunk_are_written_before_they_see_each_other() -> None:
    launcher = FiberLauncher()
    case = make_case([(40, 20)], k_head_dim=64, v_head_dim=64, writer=InPlaceWriter(launcher))
    write_step(case)
    case.check(KernelBackend(launcher, prefill="split"), PARAMS)
    assert [name for name in launcher.executed if "write" in name]


def test_few_short_sequences_get_more_simdgroups() -> None:
    launcher = FiberLauncher()
    case = make_case([(30, 1)] * 3, k_head_dim=64, v_head_dim=64, writer=InPlaceWriter(launcher))
    case.check(KernelBackend(launcher, 40), PARAMS)
    (launch,) = (name for name in launcher.executed if "decode" in name)
    wide = replace(_variant(64), num_simdgroups=8, scale=PARAMS.scale).kernel.name
    assert launch == wide


@pytest.mark.parametrize(
    ("wave", "platform", "num_simdgroups"),
    [
        (24, Platform.CUDA, 16),
        (24, Platform.METAL, 8),
        (12, Platform.CUDA, 8),
        (6, Platform.CUDA, 4),
    ],
)
def test_sequences_that_fill_a_device_are_left_whole_and_wide(
    wave: int, platform: Platform, num_simdgroups: int
) -> None:
    launcher = FiberLauncher(platform=platform)
    spans = [(300 - i, 1) for i in range(3)]
    case = make_case(spans, k_head_dim=64, v_head_dim=64, writer=InPlaceWriter(launcher))
    case.check(KernelBackend(launcher, wave), PARAMS)
    variant = replace(_variant(64), num_simdgroups=num_simdgroups, scale=PARAMS.scale)
    names = [name for name in launcher.executed if "decode" in name or "merge" in name]
    assert names == [variant.kernel.name]


def test_what_is_left_whole_is_as_wide_as_fits_at_once() -> None:
    """Not as wide as a few more would be, though plans have room for these."""
    planner = KernelBackend(RecordingLauncher(platform=Platform.CUDA), 528)._planner
    num_whole = 0
    for count in range(8, 140):
        spans, rng = [(4095, 1)] * count, np.random.default_rng(0)
        host = make_batch(spans, block_size=16, num_blocks=256 * count, rng=rng)
        for num_kv_heads in (2, 4, 8):
            base = DecodeVariant(PoolShape("bfloat16", num_kv_heads, 128, 128, 16), "bfloat16", 4)
            work = planner.plan(host, np.arange(count), 0, None, base)
            if work.merge is None:
                widths = (w for w in (1, 2, 4) if w == 1 or w * count * num_kv_heads <= 528)
                assert work.variant.num_simdgroups == 4 * max(widths)
                num_whole += 1
    assert num_whole > 30


@pytest.mark.parametrize("sinks", [False, True])
def test_neighbours_change_no_bit_in_deterministic_mode(sinks: bool) -> None:
    launcher = FiberLauncher()
    case = make_case(SPANS, factor=4, k_head_dim=64, v_head_dim=64, writer=InPlaceWriter(launcher))
    params = replace(PARAMS, sinks=mx.linspace(-1, 2, 8) if sinks else None)
    together = case.attend(KernelBackend(launcher, deterministic=True), params)
    host = case.batch.host
    for sequence in range(len(SPANS)):
        rows = slice(*host.query_start_loc[sequence : sequence + 2].tolist())
        alone = replace(
            case,
            batch=PagedBatch(_only(host, sequence)),
            queries=case.queries[rows],
        ).attend(KernelBackend(launcher, deterministic=True), params)
        assert np.array_equal(alone, together[rows])


@pytest.mark.parametrize("is_fixed", [False, True])
def test_steps_before_change_nothing_in_deterministic_mode(is_fixed: bool) -> None:
    launcher = FiberLauncher(platform=Platform.CUDA)
    chooser = KernelBackend(launcher, deterministic=is_fixed)._chooser
    variant = prefill_variant(DecodeVariant(PoolShape("float16", 8, 128, 128, 16), "float16", 4))
    chosen = {str(chooser.choose(variant, 2048, 4096, False)) for _ in range(9)}
    assert chosen == ({"kernel"} if is_fixed else {"kernel", "gather"})


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("bfloat16", "float32")])
def test_the_kernel_that_writes_passes_the_strict_check(
    dtypes: tuple[str, str], split: bool
) -> None:
    recorder = RecordingLauncher()
    case = make_case(
        [(40, 1), (299, 1)],
        factor=4,
        k_head_dim=96,
        v_head_dim=64,
        dtype=dtypes[0],
        writer=InPlaceWriter(recorder),
    )
    rows = [mx.zeros((2, 2, dim), getattr(mx, dtypes[1])) for dim in (96, 64)]
    case.store.write(0, *rows, case.batch.groups[0].slot_mapping)
    recorder.sources.clear()
    queries = case.queries.astype(rows[0].dtype)
    backend = KernelBackend(recorder, 1 << 20 if split else 1)
    backend.attend(queries, 0, 0, case.store, case.batch, PARAMS)
    assert any("written" in kernel.output_names for kernel in recorder.sources.values())
    assert not [d for source in recorder.sources for d in check(source).diagnostics]


@pytest.mark.parametrize("wave", [1, 1 << 20], ids=["whole", "cut"])
@pytest.mark.parametrize("order", AxisOrder)
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spans", [[(40, 1), (299, 1), (0, 1)], [(63, 1), (126, 1)]], ids=str)
def test_rows_that_the_kernel_writes_itself_are_as_if_written_before(
    spans: list[tuple[int, int]], pool_dtype: str, order: AxisOrder, wave: int
) -> None:
    results = []
    for fused in (True, False):
        launcher = FiberLauncher()
        case = make_case(
            spans,
            k_head_dim=64,
            v_head_dim=128,
            dtype=pool_dtype,
            order=order,
            writer=InPlaceWriter(launcher),
        )
        num_rows = case.queries.shape[0]
        keys = mx.random.normal((num_rows, 2, 64), key=mx.random.key(1))
        values = mx.random.normal((num_rows, 2, 128), key=mx.random.key(2))
        launcher.executed.clear()
        case.store.write(0, keys, values, case.batch.groups[0].slot_mapping)
        if not fused:
            case.store.commit()
        queries = case.queries.astype(mx.float32)
        backend = KernelBackend(launcher, wave)
        output = backend.attend(queries, 0, 0, case.store, case.batch, PARAMS)
        assert fused != any("write" in name for name in launcher.executed)
        slots = case.batch.groups[0].slot_mapping[None]
        results.append([output, *case.store.gather_slots(0, slots)])
    for together, apart in zip(*results, strict=True):
        assert mx.array_equal(together, apart)


@pytest.mark.parametrize("wave", [1, 1 << 20], ids=["whole", "cut"])
def test_decode_by_matrices_writes_rows_too(wave: int) -> None:
    outputs = []
    for decode, fused in (("lanes", True), ("matrices", True), ("matrices", False)):
        launcher = FiberLauncher()
        case = make_case(
            [(40, 1), (150, 1), (0, 1)],
            factor=8,
            k_head_dim=64,
            v_head_dim=96,
            dtype="bfloat16",
            writer=InPlaceWriter(launcher),
        )
        launcher.executed.clear()
        write_step(case)
        if not fused:
            case.store.commit()
        backend = KernelBackend(launcher, wave, decode=decode)
        outputs.append(backend.attend(case.queries, 0, 0, case.store, case.batch, PARAMS))
        np.testing.assert_allclose(
            np.array(outputs[-1].astype(mx.float32)), case.expected(PARAMS), atol=1e-2
        )
        assert fused != any("write" in name for name in launcher.executed)
        by_matrices = any("decode_matrix" in name for name in launcher.executed)
        assert by_matrices == (decode == "matrices")
    assert mx.array_equal(outputs[1], outputs[2])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("factor", [1, 3, 8, 16])
def test_tiles_fit_a_simdgroup_and_threadgroup_memory(
    head_dim: int, dtype: str, factor: int
) -> None:
    for rows in (1, 8):
        variant = DecodeVariant(PoolShape(dtype, 2, head_dim, head_dim, 16), dtype, factor, rows)
        assert 2 <= variant.tile * variant.heads_per_group <= 32
        assert variant.vectors >= rows * factor
        kernels = [
            variant.kernel,
            replace(variant, split=True).kernel,
            MergeVariant(variant.pool, variant.dtype, variant.factor, variant.vectors).kernel,
        ]
        assert len({kernel.name for kernel in kernels}) == 3
        assert all(len(kernel.source) < 12_000 for kernel in kernels)


@pytest.mark.parametrize(
    ("pool", "factor", "reason"),
    [
        (PoolShape("float16", 2, 64, 64, 16), 3, None),
        (PoolShape("float16", 2, 576, 512, 16), 3, "head size 576 of K"),
        (PoolShape("float16", 2, 64, 66, 16), 3, "head size 66 of V"),
        (PoolShape("float16", 2, 64, 64, 24), 3, "block size 24"),
    ],
)
def test_what_the_kernels_lack_is_said(pool: PoolShape, factor: int, reason: str | None) -> None:
    found = unsupported(pool, factor)
    assert found is None if reason is None else found is not None and found.startswith(reason)


def _variant(head_dim: int) -> DecodeVariant:
    return DecodeVariant(PoolShape("float32", 2, head_dim, head_dim, 16), "float32", 1)


def _only(host: BatchArrays, sequence: int) -> BatchArrays:
    """The part of a batch that belongs to one sequence."""
    first, end = host.query_start_loc[sequence : sequence + 2].tolist()
    group = host.groups[0]
    return replace(
        host,
        num_decodes=int(end - first == 1),
        token_ids=host.token_ids[first:end],
        positions=host.positions[first:end],
        query_start_loc=np.array([0, end - first], np.int32),
        context_lens=host.context_lens[sequence : sequence + 1],
        groups=(
            replace(
                group,
                slot_mapping=group.slot_mapping[first:end],
                block_tables=group.block_tables[sequence : sequence + 1],
            ),
        ),
    )
