"""Attention of short chunks behind long contexts: their tokens are cut across, as in decoding.

Such chunks have too few tiles to fill a GPU by ``prefill.metal`` alone, and each tile is long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.core.batch import BatchArrays, Int32Array
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import AttentionParams
from pagedmlx.ops.launch import SIMD_WIDTH, Launch, Launcher
from pagedmlx.ops.prefill import PrefillVariant
from pagedmlx.ops.runs import Run, RunPlan, attend_runs, idle_runs, plan_runs
from pagedmlx.ops.variants import MANY_CHUNKS, MergeVariant, merge_variant
from pagedmlx.ops.worklist import merge_list


@dataclass(frozen=True, slots=True)
class SplitPrefill:
    """Sequences whose rows attend together, each chunk of its tokens apart.

    Attributes:
        plan: What ``merge.metal`` reads; at last on the device, as is that of ``runs``.
        num_rows: Rows that it attends, those of padding included.
        runs: The sequences.
        merge: The kernel for their results.
    """

    plan: mx.array | Int32Array
    num_rows: int
    runs: RunPlan
    merge: MergeVariant

    @property
    def plans(self) -> list[mx.array | Int32Array]:
        """All that differs from step to step."""
        return [self.plan, self.runs.plan]

    def with_plans(self, arrays: Iterator[mx.array]) -> SplitPrefill:
        """The same with its plans on the device, taken in the order of ``plans``."""
        return replace(self, plan=next(arrays), runs=self.runs.with_plan(arrays))

    @property
    def shape(self) -> tuple[object, ...]:
        """What must agree for two steps to be the same graph."""
        return self.num_rows, self.merge, *self.runs.shape


def plan_split_prefill(
    host: BatchArrays,
    sequences: npt.NDArray[np.intp],
    group: int,
    variant: PrefillVariant,
    wave: int,
    num_padding: int = 0,
) -> SplitPrefill:
    """Plan some sequences of a step, none of whose tokens a window hides; nothing is on the device.

    Args:
        host: The step.
        sequences: Which sequences, one after the other as their rows are.
        group: The KV group.
        variant: The prefill of these layers.
        wave: Threadgroups that the device runs at once.
        num_padding: Rows behind theirs that nobody looks at.
    """
    starts = host.query_start_loc[sequences[0] : sequences[-1] + 2]
    bounds = (starts - starts[0]).tolist()
    ends = host.context_lens[sequences].tolist()
    runs = [
        Run(np.arange(first, stop), end, end - (stop - first) + 1)
        for first, stop, end in zip(bounds, bounds[1:], ends, strict=False)
    ]
    tables = [host.groups[group].block_tables[sequence] for sequence in sequences]
    # Matrices take so many registers that no more run at once. Measured on CUDA.
    plan = plan_runs(runs, tables, bounds[-1] + num_padding, variant, wave // 2)
    return _with_merge(plan, variant)


def idle_split_prefills(variant: PrefillVariant) -> list[SplitPrefill]:
    """A plan with nothing to do for all kernels that chunks in such layers may take."""
    runs = idle_runs(variant)
    return [_with_merge(replace(runs, max_chunks=count), variant) for count in (1, MANY_CHUNKS + 1)]


def _with_merge(runs: RunPlan, variant: PrefillVariant) -> SplitPrefill:
    merge = merge_variant(variant, many=runs.max_chunks > MANY_CHUNKS)
    return SplitPrefill(merge_list(runs.merges), len(runs.merges), runs, merge)


def attend_split_prefill(
    launcher: Launcher,
    queries: mx.array,
    layer: int,
    store: KVStore,
    work: SplitPrefill,
    params: AttentionParams,
) -> mx.array:
    """Attend the rows of a plan.

    Args:
        launcher: Runs the kernels.
        queries: (T, num_heads, k_head_dim).
        layer: The layer whose K and V are read.
        store: Owner of the pool.
        work: From ``plan_split_prefill``, its plans being on the device.
        params: The layer's settings.

    Returns:
        (T, num_heads, v_head_dim) in the type of ``queries``.
    """
    assert isinstance(work.plan, mx.array)
    partials = attend_runs(launcher, queries, layer, store, work.runs)
    sinks = [] if params.sinks is None else [params.sinks]
    shape = (work.num_rows, queries.shape[1], work.runs.variant.pool.v_head_dim)
    threads = work.merge.num_simdgroups * SIMD_WIDTH
    return launcher(
        Launch(
            work.merge.kernel,
            [*partials, work.plan, *sinks],
            shape[0] * shape[1] * threads,
            threads,
            [shape],
            [queries.dtype],
        )
    )[0]
