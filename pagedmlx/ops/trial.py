"""TrialLayer: an attention layer like a model's, with a pool of its own, to try kernels on."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.kv.layout import AxisOrder, KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import AttentionParams, PagedBatch
from pagedmlx.ops.decode import Decode, attend_decode
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Launcher
from pagedmlx.ops.split_prefill import SplitPrefill, attend_split_prefill
from pagedmlx.ops.variants import DecodeVariant


class TrialLayer:
    """A layer with random rows to write and attend.

    Args:
        launcher: Runs the kernels.
        base: What the layers of the model are like.
        num_blocks: Of its pool.
        num_rows: How many rows.
    """

    def __init__(
        self, launcher: Launcher, base: DecodeVariant, num_blocks: int, num_rows: int
    ) -> None:
        self._launcher = launcher
        pool = base.pool
        layout = KVLayout(
            block_size=pool.block_size,
            dtype=pool.dtype,
            layers=(LayerShape(pool.num_kv_heads, pool.k_head_dim, pool.v_head_dim),),
            groups=(KVGroup(KVGroupKind.FULL, (0,)),),
            order=AxisOrder.SLOT_MAJOR if pool.slot_major else AxisOrder.HEAD_MAJOR,
        )
        self._store = KVStore(layout, (num_blocks,), 0.01, InPlaceWriter(launcher))
        num_heads = pool.num_kv_heads * base.factor
        dtype: mx.Dtype = getattr(mx, base.dtype)
        self._params = AttentionParams(
            scale=base.scale,
            softcap=base.softcap,
            sinks=mx.zeros(num_heads, dtype) if base.sinks else None,
        )
        self._queries, self._keys, self._values = (
            mx.random.normal((num_rows, heads, head_dim)).astype(dtype)
            for heads, head_dim in (
                (num_heads, pool.k_head_dim),
                (pool.num_kv_heads, pool.k_head_dim),
                (pool.num_kv_heads, pool.v_head_dim),
            )
        )
        mx.eval(self._queries, self._keys, self._values)

    def write(self, first_slot: int) -> None:
        """Write its rows from that slot on."""
        slots = first_slot + np.arange(len(self._keys), dtype=np.int64)
        self._store.write(0, self._keys, self._values, mx.array(slots))

    def run(self, work: Decode | SplitPrefill, *, writes: bool) -> None:
        """Do what a plan says.

        Args:
            work: For this layer's blocks and rows; not on the device yet.
            writes: Do it once more with the rows' writing, if its kernel can.
        """
        work = work.with_plans(map(mx.array, work.plans))
        given = (self._launcher, self._queries, 0, self._store)
        if isinstance(work, SplitPrefill):
            self._store.commit(attend_split_prefill(*given, work, self._params))
            return
        slots = mx.arange(len(self._keys), dtype=mx.int64)
        for new in (False, True) if writes and work.writing is not None else (False,):
            self._store.write(0, self._keys, self._values, slots)
            rows = self._store.claim(0, self._queries.dtype) if new else None
            self._store.commit(attend_decode(*given, work, self._params, rows))

    def attend(
        self, backend: KernelBackend, batch: PagedBatch, times: int, *, from_pool: bool = False
    ) -> npt.NDArray[np.float32]:
        """Write and attend so many times, each depending on the one before; the last output.

        Args:
            backend: Attends.
            batch: For this layer's blocks and rows.
            times: How often.
            from_pool: Read the rows' K and V from the pool too, as where only the pool has them
                rotated.
        """
        queries = output = self._queries
        for _ in range(times):
            self._store.write(0, self._keys, self._values, batch.groups[0].slot_mapping)
            if from_pool:
                self._store.commit()
            output = backend.attend(queries, 0, 0, self._store, batch, self._params)
            queries = self._queries + output[..., :1]
        output = output.astype(mx.float32)
        self._store.commit(output)
        return np.array(output)
