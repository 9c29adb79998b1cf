"""Measures on this GPU from where on attending shared tokens once is faster.

What a cascade costs, a launch more and longer merges, and what it saves, reading the same blocks
for each sequence, depend on the GPU, on the host and on the model. So both ways are timed, once,
when a model is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import BatchArrays, GroupArrays
from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.errors import KernelError, first_line
from pagedmlx.kv.layout import AxisOrder, KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import AttentionParams, upload
from pagedmlx.ops.cascade import CascadePath
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Launcher
from pagedmlx.ops.prefill import prefill_variant
from pagedmlx.ops.variants import DecodeVariant

SHAPES = ((16, 8192), (16, 4096), (16, 2048), (8, 2048), (8, 1024), (4, 1024))
"""Sequences and the tokens that they share, which spare ever fewer."""

MIN_GAIN = 1.3
"""How much faster at least: a launch more may cost a busy host more than here."""

_NUM_OWN = 64
_CHAIN = 8
"""Attentions that depend on each other, as the layers of a model do."""
_ROUNDS = 3


def tune(backend: KernelBackend) -> list[str]:
    """Have a backend attend shared tokens once where that is faster on this device.

    Args:
        backend: Has attended already, so that it knows the model's layers.

    Returns:
        Lines for the user.
    """
    notes = []
    for base in backend.kinds:
        if not prefill_variant(base).is_supported:
            continue
        try:
            threshold = measure_threshold(backend.launcher, backend.wave, base)
        except KernelError as error:
            return [f"shared beginnings: read for each sequence: {first_line(error)}"]
        if threshold is None:
            notes.append("shared beginnings: read for each sequence, which is as fast here")
        else:
            backend.set_cascade_threshold(base, threshold)
            notes.append(
                f"shared beginnings: read once for all sequences if that spares {threshold} tokens"
            )
    return list(dict.fromkeys(notes))


def measure_threshold(
    launcher: Launcher,
    wave: int,
    base: DecodeVariant,
    shapes: Iterable[tuple[int, int]] = SHAPES,
) -> int | None:
    """Find the fewest spared tokens from which on a cascade was faster.

    Args:
        launcher: Runs the kernels.
        wave: Threadgroups that the device runs at once.
        base: Of the layers.
        shapes: Sequences and shared tokens to try, those that spare most first.

    Returns:
        Tokens that sequences need not read; None if it never was faster.
    """
    threshold = None
    for count, shared in shapes:
        if _gain(launcher, wave, base, count, shared) < MIN_GAIN:
            break
        threshold = shared * (count - 1)
    return threshold


def _gain(launcher: Launcher, wave: int, base: DecodeVariant, count: int, shared: int) -> float:
    """How many times faster a cascade is."""
    pool = base.pool
    num_blocks = (shared + count * _NUM_OWN) // pool.block_size
    layout = KVLayout(
        block_size=pool.block_size,
        dtype=pool.dtype,
        layers=(LayerShape(pool.num_kv_heads, pool.k_head_dim, pool.v_head_dim),),
        groups=(KVGroup(KVGroupKind.FULL, (0,)),),
        order=AxisOrder.SLOT_MAJOR if pool.slot_major else AxisOrder.HEAD_MAJOR,
    )
    store = KVStore(layout, (num_blocks,), 0.01, InPlaceWriter(launcher))
    batch = upload(_lay_out(count, shared, pool.block_size))
    num_heads = pool.num_kv_heads * base.factor
    params = AttentionParams(
        scale=base.scale,
        softcap=base.softcap,
        sinks=mx.zeros(num_heads) if base.sinks else None,
    )
    dtype: mx.Dtype = getattr(mx, base.dtype)
    queries, keys, values = (
        mx.random.normal((count, heads, head_dim)).astype(dtype)
        for heads, head_dim in (
            (num_heads, pool.k_head_dim),
            (pool.num_kv_heads, pool.k_head_dim),
            (pool.num_kv_heads, pool.v_head_dim),
        )
    )
    mx.eval(queries, keys, values)
    backends = [
        KernelBackend(launcher, wave, cascade=path) for path in (CascadePath.OFF, CascadePath.ON)
    ]
    seconds: list[list[float]] = [[], []]
    for _ in range(_ROUNDS + 1):
        for backend, times in zip(backends, seconds, strict=True):
            mx.synchronize()
            start = time.perf_counter()
            output = queries
            for _ in range(_CHAIN):
                store.write(0, keys, values, batch.groups[0].slot_mapping)
                output = backend.attend(output, 0, 0, store, batch, params)
                output = queries + output[..., :1]
            store.commit(output)
            times.append(time.perf_counter() - start)
    off, on = (min(times[1:]) for times in seconds)  # the first round compiles
    return off / on


def _lay_out(count: int, shared: int, block_size: int) -> BatchArrays:
    """Sequences that decode a token behind what they share and some tokens of their own."""
    end = shared + _NUM_OWN
    common = np.arange(shared // block_size)
    own = len(common) + np.arange(count * _NUM_OWN // block_size).reshape(count, -1)
    tables = np.concatenate([np.tile(common, (count, 1)), own], axis=1).astype(np.int32)
    nothing = np.empty(0, np.int32)
    rows = np.arange(count, dtype=np.int32)
    return BatchArrays(
        sequences=(),
        num_decodes=count,
        token_ids=np.zeros(count, np.int32),
        positions=np.full(count, end - 1, np.int32),
        query_start_loc=np.arange(count + 1, dtype=np.int32),
        context_lens=np.full(count, end, np.int32),
        sample_rows=rows,
        sample_sequences=(),
        groups=(
            GroupArrays(
                slot_mapping=tables[:, -1].astype(np.int64) * block_size + block_size - 1,
                block_tables=tables,
                copy_src=nothing,
                copy_dst=nothing,
            ),
        ),
    )
