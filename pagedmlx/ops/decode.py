"""Attention of sequences with few rows: how it is planned once a step, and launched in a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.core.batch import BatchArrays, Int32Array
from pagedmlx.kv.store import KVStore, Unwritten
from pagedmlx.ops.base import AttentionParams
from pagedmlx.ops.cascade import (
    Cascade,
    CascadePath,
    CascadePlanner,
    idle_cascade,
)
from pagedmlx.ops.launch import SIMD_WIDTH, Launch, Launcher, Platform
from pagedmlx.ops.prefill import PrefillVariant, prefill_variant
from pagedmlx.ops.runs import attend_runs
from pagedmlx.ops.variants import (
    MANY_CHUNKS,
    MAX_ROWS,
    DecodePath,
    DecodeVariant,
    MergeVariant,
    decode_by,
    merge_variant,
)
from pagedmlx.ops.worklist import (
    WorkList,
    choose_chunk,
    fixed_chunks,
    idle_work_list,
    make_work_list,
    widest,
)


@dataclass(frozen=True, slots=True)
class Decode:
    """Sequences with few rows: the plan, at last on the device, and the kernels that follow it.

    ``writing`` is ``variant`` that also writes the rows' K and V; None where rows see each other or
    several threadgroups share them.
    """

    plan: mx.array | Int32Array
    num_items: int
    num_rows: int
    variant: DecodeVariant
    writing: DecodeVariant | None
    merge: MergeVariant | None
    cascade: Cascade | None

    @property
    def plans(self) -> list[mx.array | Int32Array]:
        """All that differs from step to step."""
        return [self.plan] if self.cascade is None else [self.plan, self.cascade.runs.plan]

    def with_plans(self, arrays: Iterator[mx.array]) -> Decode:
        """The same with its plans on the device, taken in the order of ``plans``."""
        work = replace(self, plan=next(arrays))
        if self.cascade is None:
            return work
        runs = self.cascade.runs.with_plan(arrays)
        return replace(work, cascade=replace(self.cascade, runs=runs))

    @property
    def shape(self) -> tuple[object, ...]:
        """What must agree for two steps to be the same graph."""
        shared = None if self.cascade is None else self.cascade.runs.shape
        return self.num_items, self.num_rows, self.plan.size, self.variant, self.merge, shared


class DecodePlanner:
    """Chooses kernels and cuts work for them.

    Args:
        platform: Whose kernels.
        wave: Threadgroups that the device runs at once.
        deterministic: Cut each sequence by its own length alone.
        path: How the decode kernel multiplies.
        cascade: Whether tokens that sequences share are attended once.
        columns: Of the prefill kernel; None is as many as suit the platform.

    Attributes:
        cascades: Plans that.
    """

    def __init__(
        self,
        platform: Platform,
        wave: int,
        deterministic: bool,
        path: DecodePath,
        cascade: CascadePath,
        columns: int | None,
    ) -> None:
        self._platform = platform
        self._wave = wave
        self._deterministic = deterministic
        self._path = path
        # On Metal nobody has measured two, and they take more registers than it likes.
        self._columns = columns or (2 if platform is Platform.CUDA else 1)
        self.cascades = CascadePlanner(cascade, wave)
        self._variants: dict[DecodeVariant, DecodeVariant] = {}
        self._changes: dict[tuple[object, ...], DecodeVariant] = {}
        self._prefills: dict[DecodeVariant, PrefillVariant] = {}

    def plan(
        self,
        host: BatchArrays,
        sequences: npt.NDArray[np.intp],
        group: int,
        window: int | None,
        base: DecodeVariant,
        num_padding: int = 0,
    ) -> Decode:
        """Plan some sequences of a step; nothing is on the device yet.

        Args:
            host: The step.
            sequences: Which sequences, each with at most MAX_ROWS rows; their rows come in this
                order.
            group: The KV group.
            window: Tokens that a row sees; None is all.
            base: What is fixed for these layers.
            num_padding: Rows behind theirs that nobody looks at.
        """
        counts = np.diff(host.query_start_loc)[sequences]
        ends = host.context_lens[sequences]
        tables = host.groups[group].block_tables[sequences]
        # Of more kernels, each for its own number of rows, many would be compiled in mid-serving.
        rows = 1 if counts.max() == 1 else MAX_ROWS
        fixed = self._deterministic
        cascade = None
        lows = np.zeros_like(ends)
        if window is not None:
            lows = np.maximum(ends - counts - window + 1, 0)
        elif rows == 1 and not fixed:
            who = tuple(host.sequences[place] for place in sequences) if host.sequences else ()
            shared = self.prefill_variant(base)
            cascade = self.cascades.try_plan(group, who, tables, ends, shared)
            lows = lows if cascade is None else cascade.lows
        whole = self._whole(base, rows)
        groups_per_item = whole.pool.num_kv_heads * whole.parts_for(int(counts.max()))
        widths = (1,) if cascade is not None else self._widths(whole)
        if fixed:
            chunks = fixed_chunks(lows, ends)
        else:
            chunks = choose_chunk(lows, ends, groups_per_item, self._wave, widths)
        work = make_work_list(counts, lows, ends, tables, chunks, window, num_padding=num_padding)
        # What isn't cut takes another path to the same sum, so neighbours would change its bits.
        if work.max_chunks == 1 and not fixed and cascade is None:
            longest, num_groups = int((ends - lows).max()), len(ends) * groups_per_item
            width = widest(num_groups, longest, self._wave, widths)
            return self._steps(work, self._wider(whole, width), None, None)
        return self._split(work, whole, cascade)

    def idle_works(self, base: DecodeVariant) -> list[Decode]:
        """A plan with nothing to do for all kernels that ``plan`` may choose, beside cascades'.

        Args:
            base: What is fixed for some layers.
        """
        works = []
        for rows in (1, MAX_ROWS):
            whole = self._whole(base, rows)
            if not self._deterministic:
                works += [
                    self._steps(idle_work_list(1), self._wider(whole, width), None, None)
                    for width in self._widths(whole)
                ]
                works.append(self._split(idle_work_list(2), whole, None))
            works.append(self._split(idle_work_list(MANY_CHUNKS + 1), whole, None))
        return works

    def idle_cascades(self, base: DecodeVariant) -> list[Decode]:
        """The same for all kernels of steps with a cascade."""
        cascade = idle_cascade(self.prefill_variant(base))
        whole = self._whole(base, 1)
        return [
            self._split(idle_work_list(count), whole, cascade) for count in (1, MANY_CHUNKS + 1)
        ]

    def _whole(self, base: DecodeVariant, rows: int) -> DecodeVariant:
        """The kernel for sequences of up to so many rows."""
        whole = self._changed(base, rows=rows)
        return self.interned(decode_by(self._path, whole, self._platform))

    def _widths(self, whole: DecodeVariant) -> list[int]:
        """How many times as wide the threadgroups can be that attend whole sequences."""
        if whole.rows > 1:
            return [1]
        # On Metal nobody has measured more than two.
        most = 4 if self._platform is Platform.CUDA else 2
        memory = self._platform.threadgroup_bytes
        return [
            width for width in (1, 2, 4) if width <= most and width * whole.needed_bytes <= memory
        ]

    def _wider(self, whole: DecodeVariant, width: int) -> DecodeVariant:
        return self._changed(whole, num_simdgroups=width * whole.num_simdgroups)

    def _split(self, work: WorkList, whole: DecodeVariant, cascade: Cascade | None) -> Decode:
        """Kernels for sequences whose results are merged."""
        num_chunks, shared_vectors = work.max_chunks, 0
        if cascade is not None:
            cascade.mark(work)
            num_chunks += cascade.runs.max_chunks
            shared_vectors = cascade.runs.variant.vectors
        split = self._changed(whole, split=True)
        many = self._deterministic or num_chunks > MANY_CHUNKS
        merge = merge_variant(split, many=many, shared_vectors=shared_vectors)
        return self._steps(work, split, merge, cascade)

    def prefill_variant(self, base: DecodeVariant) -> PrefillVariant:
        """What attends chunks of prompts in the same layers, and what sequences share there."""
        found = self._prefills.get(base)
        if found is None:
            memory = self._platform.threadgroup_bytes
            found = self._prefills[base] = prefill_variant(base, self._columns, memory)
        return found

    def _changed(self, variant: DecodeVariant, **changes: Any) -> DecodeVariant:
        """The one variant that differs so; to look it up is quicker than to make it anew."""
        key = variant, *changes.items()
        found = self._changes.get(key)
        if found is None:
            found = self._changes[key] = self.interned(replace(variant, **changes))
        return found

    def interned(self, variant: DecodeVariant) -> DecodeVariant:
        """The one object for equal variants, so that texts are put together once."""
        return self._variants.setdefault(variant, variant)

    def _steps(
        self,
        work: WorkList,
        variant: DecodeVariant,
        merge: MergeVariant | None,
        cascade: Cascade | None,
    ) -> Decode:
        can_write = variant.rows == 1 and variant.parts == 1
        writing = self._changed(variant, writes=True) if can_write else None
        return Decode(work.plan, work.num_items, work.num_rows, variant, writing, merge, cascade)


def attend_decode(
    launcher: Launcher,
    queries: mx.array,
    layer: int,
    store: KVStore,
    work: Decode,
    params: AttentionParams,
    new: Unwritten | None,
) -> mx.array:
    """Attend the rows of a plan.

    Args:
        launcher: Runs the kernels.
        queries: (S, num_heads, k_head_dim).
        layer: The layer whose K and V are read.
        store: Owner of the pool.
        work: From ``DecodePlanner.plan``, its plans being on the device.
        params: The layer's settings.
        new: K and V of the rows, if they are to be written here.

    Returns:
        (S, num_heads, v_head_dim) in the type of ``queries``.
    """
    pool, token = store.bind(layer)
    plan = work.plan
    assert isinstance(plan, mx.array)
    variant = work.variant if new is None else work.writing
    assert variant is not None
    num_kv_heads, v_head_dim = variant.pool.num_kv_heads, variant.pool.v_head_dim
    sinks = [] if params.sinks is None else [params.sinks]
    out_shape = (work.num_rows, num_kv_heads * variant.factor, v_head_dim)
    inputs = [queries, *pool.bound, plan]
    shapes: list[tuple[int, ...]] = [out_shape]
    dtypes = [queries.dtype]
    if work.merge is None:
        inputs += sinks
    else:
        partials = (work.num_items, num_kv_heads, variant.vectors)
        shapes = [(*partials, v_head_dim), (*partials, 2)]
        dtypes = [mx.float32, mx.float32]
    inputs.append(token)
    if new is not None:
        inputs += [new.keys, new.values]
        shapes = [*shapes, token.shape]
        dtypes = [*dtypes, token.dtype]
    threads = variant.num_simdgroups * SIMD_WIDTH
    num_threads = work.num_items * num_kv_heads * variant.parts * threads
    outputs = launcher(Launch(variant.kernel, inputs, num_threads, threads, shapes, dtypes))
    if new is not None:
        store.wrote(outputs.pop())
    if work.merge is None:
        return outputs[0]
    shared = []
    if work.cascade is not None:
        shared = attend_runs(launcher, queries, layer, store, work.cascade.runs)
    threads = work.merge.num_simdgroups * SIMD_WIDTH
    return launcher(
        Launch(
            work.merge.kernel,
            [*outputs, plan, *sinks, *shared],
            out_shape[0] * out_shape[1] * threads,
            threads,
            [out_shape],
            [queries.dtype],
        )
    )[0]
