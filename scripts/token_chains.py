"""Chains of writes and reads, each write of what was read last: a section of check_kernels.py.

They are right only if every read comes after the write before it, which the pool's token sees to.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.kv.layout import KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import LayerPool, NewRows, PoolWriter, Rope
from pagedmlx.ops.base import AttentionParams, PagedBatch
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import MLXLauncher
from scripts.kernel_layers import find_platform
from tests.support.batches import make_batch

TOKEN_STEPS = 100
CHUNK = 512


def check_token() -> dict[str, Any]:
    """A chain of writes and reads is right with the token and, so that this says anything, wrong
    without it, for a reader that is a kernel of ours and for one that is an operation of MLX.
    """
    modes = ("lazy", "async", "sync")
    found = {
        f"{reader} {mode} {'with' if token else 'without'}": _count_up(reader, mode, token)
        for reader in ("attention", "mlx gather")
        for mode in modes
        for token in (True, False)
    } | {
        f"{reader} {mode} with": _count_up(reader, mode, True)
        for reader in ("attention that writes", "attention of rotated rows")
        for mode in modes
    }
    found |= {f"gathered chunk {mode} with": _count_chunks(mode) for mode in ("lazy", "async")}
    right = all(value == TOKEN_STEPS for name, value in found.items() if name.endswith(" with"))
    wrong = {name for name, value in found.items() if value != TOKEN_STEPS}
    seen = {name.rsplit(maxsplit=2)[0] for name in wrong} == {"attention", "mlx gather"}
    return {"ok": right and seen, "expected": TOKEN_STEPS, "found": found}


class _Forgetful:
    """A writer whose tokens tell nothing; the real ones are kept, so that the writes happen."""

    def __init__(self, inner: InPlaceWriter) -> None:
        self.inner = inner
        self.kept: list[mx.array] = []
        self._nothing = inner.first_token()
        mx.eval(self._nothing)

    def first_token(self) -> mx.array:
        return self._nothing

    def adopt(self, pool: LayerPool) -> LayerPool:
        return self.inner.adopt(pool)

    def write(
        self,
        pool: LayerPool,
        keys: mx.array,
        values: mx.array,
        slots: mx.array,
        token: mx.array | None,
    ) -> mx.array:
        self.kept.append(self.inner.write(pool, keys, values, slots, token))
        return self._nothing

    def copy_blocks(
        self,
        pools: list[LayerPool],
        src: npt.NDArray[np.int32],
        dst: npt.NDArray[np.int32],
        token: mx.array | None,
    ) -> mx.array:
        self.kept.append(self.inner.copy_blocks(pools, src, dst, token))
        return self._nothing


def _count_up(reader: str, mode: str, token: bool) -> float:
    """Write one more than what was read last, read it, and so on; what is read in the end."""
    launcher = MLXLauncher(find_platform())
    layout = KVLayout(
        block_size=16,
        dtype="float32",
        layers=(LayerShape(1, 64, 64),),
        groups=(KVGroup(KVGroupKind.FULL, (0,)),),
    )
    forgetful = _Forgetful(InPlaceWriter(launcher))
    writer: PoolWriter = forgetful.inner if token else forgetful
    store = KVStore(layout, (64,), 0.0, writer)
    backend, params = KernelBackend(launcher), AttentionParams(scale=1.0)
    rng = np.random.default_rng(0)
    host = make_batch([(0, 1)], block_size=16, num_blocks=64, rng=rng)
    batch = PagedBatch(host)
    slots = batch.groups[0].slot_mapping
    row = mx.zeros((1, 1, 64))
    mx.eval(row, slots)
    for _ in range(TOKEN_STEPS):
        if reader == "attention of rotated rows":
            rows = row[:, :, None]
            new = NewRows(rows, rows, rows + 1, batch.positions, slots)
            row = store.write_rotated(0, new, Rope(64, False, 10000.0, 1.0))
        else:
            store.write(0, row, row + 1, slots)
        if reader == "attention":
            # Have it written by a kernel of its own.
            store.bind(0)
        if reader.startswith("attention"):
            # One token of context: attention gives its V.
            row = backend.attend(row, 0, 0, store, batch, params)
        else:
            row = store.gather_slots(0, slots[None])[1].reshape(1, 1, 64)
        if mode == "async":
            store.submit(row, *forgetful.kept)
        elif mode == "sync":
            store.commit(row, *forgetful.kept)
        if mode != "lazy":
            forgetful.kept.clear()
    store.commit(row, *forgetful.kept)
    return largest(row)


def _count_chunks(mode: str) -> float:
    """The same by chunks whose K and V are gathered to memory that two layers share."""
    launcher = MLXLauncher(find_platform())
    layout = KVLayout(
        block_size=16,
        dtype="bfloat16",
        layers=(LayerShape(1, 64, 64),) * 2,
        groups=(KVGroup(KVGroupKind.FULL, (0, 1)),),
    )
    store = KVStore(layout, (64,), 0.0, InPlaceWriter(launcher))
    backend = KernelBackend(launcher, prefill="gather")
    rng = np.random.default_rng(0)
    host = make_batch([(CHUNK, CHUNK)], block_size=16, num_blocks=64, rng=rng)
    batch = PagedBatch(host)
    blocks = mx.array(host.groups[0].block_tables[0, : 2 * CHUNK // 16].astype(np.int64))
    slots = (blocks[:, None] * 16 + mx.arange(16)).reshape(-1)
    rows = mx.zeros((CHUNK, 1, 64), mx.bfloat16)
    mx.eval(rows, slots)
    for step in range(TOKEN_STEPS):
        values = mx.concatenate([rows, rows]) + 1
        store.write(step % 2, mx.zeros_like(values), values, slots)
        # All tokens have one V, which attention gives but for rounding.
        rows = backend.attend(rows, step % 2, 0, store, batch, AttentionParams(scale=1.0))
        rows = mx.round(rows)
        if mode == "async":
            store.submit(rows)
    store.commit(rows)
    return largest(rows)


def largest(array: mx.array) -> float:
    """The largest element."""
    largest: Any = array.max().item()
    return float(largest)
