"""A handful of kernels beside what they replace, for ``pagedmlx doctor --kernels``.

It finds what is wrong, not what is inexact; ``scripts/check_kernels.py`` compares with float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import NO_BLOCK, batch_of
from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.errors import first_line
from pagedmlx.kv.layout import KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import FunctionalWriter, NewRows, Rope
from pagedmlx.ops import AttentionPath
from pagedmlx.ops.base import AttentionParams, PagedBatch
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Launcher, MLXLauncher, gpu_platform
from pagedmlx.ops.most_likely import MostLikely
from pagedmlx.ops.prefill_path import PrefillPath
from pagedmlx.ops.reference import ReferenceBackend
from pagedmlx.sampling.greedy import num_different

TOLERANCES = {"float32": 5e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest difference between outputs of about 1; a GPU's own float32 products may be inexact."""

_BLOCK_SIZE = 16
_NUM_KV_HEADS = 2
# Threadgroups to fill: never cut a sequence, or cut it into the shortest parts.
_WHOLE, _IN_PARTS = 1, 1 << 30


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One variant.

    Attributes:
        name: What ran.
        ok: Whether it agrees with the reference backend, or with MLX's choice of tokens.
        error: Largest difference, or rows with another token; None if it didn't run.
        tolerance: What that may be.
        problem: Why it didn't run, or None.
    """

    name: str
    ok: bool
    error: float | None
    tolerance: float
    problem: str | None


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What came out.

    Attributes:
        path: The attention backend to expect of ``auto``.
        reason: Why that one.
        ok: Whether no check failed.
        checks: The variants; none without a GPU.
    """

    path: str
    reason: str
    ok: bool
    checks: tuple[KernelCheck, ...]


@dataclass(frozen=True, slots=True)
class _Case:
    """Sequences that compute tokens [start, start + count), and the layer they meet."""

    name: str
    dtype: str
    head_dim: int
    factor: int
    spans: tuple[tuple[int, int], ...]
    window: int | None = None
    sinks: bool = False
    wave: int = _WHOLE
    prefill: PrefillPath = PrefillPath.KERNEL
    rope: Rope | None = None


_DECODES = ((15, 1), (16, 1), (40, 1), (299, 1))
_CHUNKS = ((40, 1), (0, 17), (30, 41))
_CASES = (
    _Case("decode", "float16", 64, 3, _DECODES),
    _Case("decode in parts", "bfloat16", 128, 4, _DECODES, wave=_IN_PARTS),
    _Case("decode of several rows, window, sinks", "float32", 64, 2, ((30, 4), (9, 3)), 20, True),
    _Case("prefill", "float16", 64, 3, _CHUNKS),
    _Case("prefill, window", "bfloat16", 128, 4, _CHUNKS, 20),
    _Case("prefill by gather", "float16", 64, 3, _CHUNKS, prefill=PrefillPath.GATHER),
    _Case("prefill in parts", "float16", 64, 3, _CHUNKS, prefill=PrefillPath.SPLIT),
    _Case("decode after RoPE", "bfloat16", 128, 4, _DECODES, rope=Rope(128, False, 1e4, 1.0)),
    _Case("prefill after RoPE", "float16", 64, 3, _CHUNKS, rope=Rope(32, True, 5e5, 0.5)),
)

_NUM_LOGITS = 5001
"""Odd, so that rows lie in memory as no vector does."""


def check_kernels(launcher: Launcher | None = None) -> KernelReport:
    """Compile and run some variants, and say which attention backend to expect.

    Args:
        launcher: Runs the kernels; that of the default device if None.
    """
    if launcher is None:
        platform = gpu_platform()
        if platform is None:
            return KernelReport(
                "gather", "kernels need a GPU, and MLX computes on the CPU here", True, ()
            )
        launcher = MLXLauncher(platform)
    attention = [_check(case, launcher) for case in _CASES]
    checks = (*attention, *(_check_greedy(dtype, launcher) for dtype in TOLERANCES))
    # Sampling alone can do without its kernel.
    path = "kernels" if all(check.ok for check in attention) else "gather"
    failed = [check.name for check in checks if not check.ok]
    if failed:
        reason = (
            f"{len(failed)} of {len(checks)} kernel checks failed ({'; '.join(failed)}); "
            "the comparison at load has the last word for each model"
        )
        return KernelReport(path, reason, False, checks)
    reason = (
        f"{len(checks)} kernel checks agree with what the kernels replace; each model's logits are "
        "compared with mlx-lm's at load"
    )
    return KernelReport(path, reason, True, checks)


def _check(case: _Case, launcher: Launcher) -> KernelCheck:
    name, tolerance = f"{case.name}, {case.dtype}", TOLERANCES[case.dtype]
    kernels = AttentionPath(
        KernelBackend(launcher, case.wave, prefill=case.prefill), InPlaceWriter(launcher)
    )
    reference = AttentionPath(ReferenceBackend(), FunctionalWriter())
    try:
        found, expected = (_attend(case, path) for path in (kernels, reference))
    except Exception as error:  # whatever a compiler or a device has to say
        return KernelCheck(name, False, None, tolerance, first_line(error))
    difference = float(np.abs(found - expected).max())
    if np.isnan(difference):
        return KernelCheck(name, False, None, tolerance, "the output holds NaN")
    return KernelCheck(name, difference <= tolerance, difference, tolerance, None)


def _check_greedy(dtype: str, launcher: Launcher) -> KernelCheck:
    name = f"most likely token, {dtype}"
    try:
        count = num_different(MostLikely(launcher), dtype, _NUM_LOGITS)
    except Exception as error:  # whatever a compiler or a device has to say
        return KernelCheck(name, False, None, 0, first_line(error))
    return KernelCheck(name, count == 0, count, 0, None)


def _attend(case: _Case, path: AttentionPath) -> np.ndarray:
    """Write the past, copy a block, write the step's rows, and attend; the same for each path."""
    rng = np.random.default_rng(0)
    layout = KVLayout(
        block_size=_BLOCK_SIZE,
        dtype=case.dtype,
        layers=(LayerShape(_NUM_KV_HEADS, case.head_dim, case.head_dim),),
        groups=(KVGroup(KVGroupKind.FULL, (0,)),),
    )
    lengths = [start + count for start, count in case.spans]
    widths = [-(-length // _BLOCK_SIZE) for length in lengths]
    # The spare block is the last to be drawn.
    ids = rng.permutation(sum(widths) + 1).astype(np.int32)
    tables = np.full((len(widths), max(widths)), NO_BLOCK, np.int32)
    for row, end, width in zip(tables, np.cumsum(widths), widths, strict=True):
        row[:width] = ids[end - width : end]
    # Slots that nobody writes hold NaN, so that reading one shows.
    store = KVStore(layout, (len(ids),), float("nan"), path.writer)

    def normal(num_rows: int, num_heads: int) -> mx.array:
        values = rng.standard_normal((num_rows, num_heads, case.head_dim), np.float32)
        return mx.array(values).astype(getattr(mx, case.dtype))

    def new_rows(num_rows: int) -> list[mx.array]:
        return [normal(num_rows, _NUM_KV_HEADS) for _ in range(2)]

    past = batch_of([(0, start) for start, _ in case.spans], [tables], _BLOCK_SIZE)
    slots = mx.array(past.groups[0].slot_mapping)
    keys, values = new_rows(past.num_rows)
    store.write(0, keys, values, slots)
    store.copy_blocks(0, tables[0, :1].copy(), ids[-1:])
    tables[0, 0] = ids[-1]
    num_heads = _NUM_KV_HEADS * case.factor
    params = AttentionParams(
        scale=case.head_dim**-0.5,
        window=case.window,
        sinks=mx.array(np.linspace(-1, 1, num_heads, dtype=np.float32)) if case.sinks else None,
    )
    batch = PagedBatch(batch_of(case.spans, [tables], _BLOCK_SIZE))
    keys, values = new_rows(batch.num_rows)
    queries = _write(store, batch, normal(batch.num_rows, num_heads), keys, values, case.rope)
    output = path.backend.attend(queries, 0, 0, store, batch, params)
    store.commit(output)
    return np.array(output.astype(mx.float32))


def _write(
    store: KVStore,
    batch: PagedBatch,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    rope: Rope | None,
) -> mx.array:
    """Write a step's rows, rotated if need be, and return the queries likewise."""
    slots = batch.groups[0].slot_mapping
    if rope is not None:
        new = NewRows(
            queries[:, :, None], keys[:, :, None], values[:, :, None], batch.positions, slots
        )
        if store.can_rotate:
            return store.write_rotated(0, new, rope)
        queries, keys = (rope.rotate(rows, batch.positions) for rows in (new.queries, new.keys))
    store.write(0, keys, values, slots)
    return queries
