"""KernelBackend: attention straight over the blocks, by the kernels in ``metal/``.

Sequences with few rows go through the decode kernel; chunks through ``prefill``, ``split_prefill``
where they are short and their context is long, or ``chunks`` where MLX's own attention is faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import BatchArrays, Int32Array
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import AttentionParams, PagedBatch
from pagedmlx.ops.cascade import CascadePath, CascadePlanner
from pagedmlx.ops.chunks import Chunk, attend_chunk, plan_chunk
from pagedmlx.ops.decode import Decode, DecodePlanner, attend_decode
from pagedmlx.ops.in_place import dtype_name, layer_shape
from pagedmlx.ops.launch import Launcher
from pagedmlx.ops.prefill import Prefill, PrefillVariant, attend_prefill, plan_prefill
from pagedmlx.ops.prefill_path import PrefillChooser, PrefillPath
from pagedmlx.ops.scratch import ALIGNMENT, Scratch
from pagedmlx.ops.split_prefill import (
    SplitPrefill,
    attend_split_prefill,
    idle_split_prefills,
    plan_split_prefill,
)
from pagedmlx.ops.variants import MAX_ROWS, DecodePath, DecodeVariant, GatherVariant, PoolShape

DEFAULT_WAVE = 528
"""Threadgroups of 4 SIMD-groups that an H200 runs at once: 132 multiprocessors with 4 each."""


class KernelBackend:
    """Attends through custom kernels; what they do is planned once a step.

    Args:
        launcher: Runs the kernels.
        wave: Threadgroups that the device runs at once; long sequences are cut so that about as
            many run.
        deterministic: Cut each sequence by its own length alone, and leave prefill chunks to the
            kernel, so that neighbours and steps before change nothing in a result.
        prefill: Who attends prefill chunks; also forced, it is the gather where the kernel can't.
        decode: How the decode kernel multiplies; also forced, by lanes where matrices can't.
        cascade: Whether tokens that sequences share are attended once.
        columns: Groups of 8 query vectors that a SIMD-group of the prefill kernel attends, 1 or 2;
            None is what suits the platform's registers.

    Attributes:
        launcher: As given.
        wave: As given.
        has_written: Whether a launch that decodes has stored its rows' K and V; where a model's
            queries and keys are rotated as they are written, none does.
    """

    name = "kernels"
    takes_padding = True

    def __init__(
        self,
        launcher: Launcher,
        wave: int = DEFAULT_WAVE,
        deterministic: bool = False,
        prefill: PrefillPath | str = PrefillPath.AUTO,
        decode: DecodePath | str = DecodePath.AUTO,
        cascade: CascadePath | str = CascadePath.AUTO,
        columns: int | None = None,
    ) -> None:
        self.launcher = launcher
        self.wave = wave
        self.has_written = False
        path = PrefillPath(prefill)
        if deterministic and path is PrefillPath.AUTO:
            path = PrefillPath.KERNEL  # by itself it may be another one the next time
        self._chooser = PrefillChooser(path, launcher.platform, wave)
        self._planner = DecodePlanner(
            launcher.platform,
            wave,
            deterministic,
            DecodePath(decode),
            CascadePath(cascade),
            columns,
        )
        self._gathers: dict[tuple[PoolShape, str], GatherVariant] = {}
        self._scratch = Scratch(launcher)
        self._batch: PagedBatch | None = None
        self._plans: dict[tuple[int, int | None, int], tuple[_Part, ...]] = {}
        self._kinds: dict[tuple[int, int | None, int], DecodeVariant] = {}
        self._layers: dict[int, tuple[object, DecodeVariant]] = {}

    def attend(
        self,
        queries: mx.array,
        layer: int,
        group: int,
        store: KVStore,
        batch: PagedBatch,
        params: AttentionParams,
    ) -> mx.array:
        """See ``AttentionBackend.attend``."""
        plan = self._plan(queries, layer, group, store, batch, params)
        parts = []
        num_left = len(queries) - plan[-1].rows.stop
        is_whole = len(plan) == 1 and num_left == 0
        for part in plan:
            rows = queries if is_whole else queries[part.rows]
            if isinstance(part.work, Chunk):
                here, scratch = batch.groups[group], self._scratch
                parts.append(
                    attend_chunk(
                        self.launcher, rows, layer, here, store, scratch, part.work, params
                    )
                )
            elif isinstance(part.work, Prefill):
                parts.append(attend_prefill(self.launcher, rows, layer, store, part.work, params))
            elif isinstance(part.work, SplitPrefill):
                parts.append(
                    attend_split_prefill(self.launcher, rows, layer, store, part.work, params)
                )
            else:
                # A launch with all rows of the step can also write them.
                can_write = is_whole and part.work.writing is not None
                new = store.claim(layer, rows.dtype) if can_write else None
                self.has_written |= new is not None
                output = attend_decode(self.launcher, rows, layer, store, part.work, params, new)
                parts.append(output)
        if num_left:
            parts.append(mx.zeros((num_left, *parts[0].shape[1:]), queries.dtype))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def rest(self) -> None:
        """See ``AttentionBackend.rest``."""
        self._batch, self._plans = None, {}
        self.cascades.forget()
        self._scratch.drop()

    @property
    def cascades(self) -> CascadePlanner:
        """Who plans what sequences share."""
        return self._planner.cascades

    @property
    def kinds(self) -> list[DecodeVariant]:
        """The kinds of layers that have been attended in and see all tokens."""
        return [*dict.fromkeys(b for (_, window, _), b in self._kinds.items() if window is None)]

    def idle_works(self) -> list[tuple[DecodeVariant, Decode]]:
        """A plan with nothing to do for all kernels that may come to attend few rows.

        Returns:
            With the kind of layers that each is for, of those that have been attended in.
        """
        bases = dict.fromkeys(self._kinds.values())
        return [(base, work) for base in bases for work in self._planner.idle_works(base)]

    def idle_cascades(self, kind: DecodeVariant) -> list[Decode]:
        """The same for steps with a cascade, in such layers."""
        return self._planner.idle_cascades(kind)

    def idle_split_prefills(self, kind: DecodeVariant) -> list[SplitPrefill]:
        """The same for short chunks, in such layers."""
        return idle_split_prefills(self._planner.prefill_variant(kind))

    @property
    def keeps_scores(self) -> bool:
        """Whether some layer's attention keeps all scores of a prompt's chunk at once."""
        return any(
            self._chooser.keeps_scores(self._planner.prefill_variant(kind)) for kind in self.kinds
        )

    def chunk_multiple(self, max_chunk: int) -> int:
        """Where chunks of prompts should end, so that their shapes recur if that saves time.

        Args:
            max_chunk: Most tokens of a chunk.
        """
        if not any(map(self.can_plan_chunks, self.kinds)):
            return 1
        return 1 << (max_chunk.bit_length() - 1)

    def can_plan_chunks(self, kind: DecodeVariant) -> bool:
        """Whether chunks in such layers may go by an attention that needs a plan for each shape."""
        return self._chooser.can_be_planned(self._planner.prefill_variant(kind))

    def note_chunk_plan(self, kind: DecodeVariant, num_rows: int, num_tokens: int) -> None:
        """There is a plan for chunks of this shape in such layers."""
        self._chooser.note_plan(self._planner.prefill_variant(kind), num_rows, num_tokens)

    def set_cascade_threshold(self, kind: DecodeVariant, num_tokens: int) -> None:
        """Attend shared tokens once in such layers if that spares at least so many tokens."""
        shared = self._planner.prefill_variant(kind)
        self.cascades.thresholds[shared] = num_tokens

    def avoid_runs(self) -> None:
        """Attend no runs any more: neither what sequences share nor short chunks in parts."""
        self.cascades.thresholds.clear()
        self._chooser.may_split = False

    def can_plan_ahead(self, host: BatchArrays) -> bool:
        """Whether all of a step's rows are attended in ways that need no room but their plans.

        False before any step has shown the layers.
        """
        return bool(self._kinds) and all(
            num_rows <= MAX_ROWS
            or self._chooser.splits(
                self._planner.prefill_variant(base), num_rows, num_tokens, is_masked
            )
            for (_, window, _), base in self._kinds.items()
            for num_rows, num_tokens, is_masked in _seen(host, window)
        )

    def plan_ahead(self, batch: PagedBatch) -> StepPlans | None:
        """Plan a step before the model runs, for the kinds of layers that steps before had.

        Returns:
            None if it can't be planned ahead.
        """
        if not self.can_plan_ahead(batch.host):
            return None
        works = {
            (group, window, kind): self._make_plan(batch, group, window, base)
            for (group, window, kind), base in self._kinds.items()
        }
        return StepPlans({key: _only_planned(each) for key, each in works.items()})

    def follow(self, batch: PagedBatch, plans: StepPlans, arrays: Sequence[mx.array]) -> None:
        """Take these plans for a batch, their arrays being on the device."""
        self._batch = batch
        taken = iter(arrays)
        self._plans = {
            key: _in_rows(work.with_plans(taken) for work in works)
            for key, works in plans.works.items()
        }

    def _plan(
        self,
        queries: mx.array,
        layer: int,
        group: int,
        store: KVStore,
        batch: PagedBatch,
        params: AttentionParams,
    ) -> tuple[_Part, ...]:
        if self._batch is not batch:
            self._batch, self._plans = batch, {}
        base = self._layer_variant(queries, layer, store, params)
        # Most layers of a group share their shape and settings, and so their plan.
        key = (group, params.window, id(base))
        plan = self._plans.get(key)
        if plan is None:
            works = self._make_plan(batch, group, params.window, base)
            plan = self._plans[key] = _in_rows(map(_on_device, works))
            self._kinds[key] = base
        return plan

    def _layer_variant(
        self, queries: mx.array, layer: int, store: KVStore, params: AttentionParams
    ) -> DecodeVariant:
        """What is fixed for a layer; found by comparing with what it was the last time."""
        known = self._layers.get(layer)
        settings = (params.scale, params.softcap, params.sinks is not None)
        kind = (queries.shape[1], queries.dtype, store.layout, settings)
        if known is not None and known[0] == kind:
            return known[1]
        shape = layer_shape(store.layout, layer)
        variant = DecodeVariant(
            pool=shape,
            dtype=dtype_name(queries.dtype),
            factor=queries.shape[1] // shape.num_kv_heads,
            sinks=params.sinks is not None,
            scale=params.scale,
            softcap=params.softcap,
        )
        variant = self._planner.interned(variant)
        self._layers[layer] = (kind, variant)
        return variant

    def _make_plan(
        self, batch: PagedBatch, group: int, window: int | None, base: DecodeVariant
    ) -> list[_Work]:
        """Cut a step's sequences, in their order, into runs that are attended in the same way.

        Padding belongs to the last one, if that can be planned ahead. What can be is not on the
        device yet.
        """
        host = batch.host
        gather = self._gathers.setdefault(
            (base.pool, base.dtype), GatherVariant(base.pool, base.dtype)
        )
        num_gathered = 0
        works: list[_Work] = []
        ways = self._ways(host, window, self._planner.prefill_variant(base))
        for way, run in itertools.groupby(range(len(ways)), ways.__getitem__):
            sequences = np.array(list(run))
            padding = batch.num_padding if sequences[-1] == len(ways) - 1 else 0
            match way:
                case PrefillPath.SPLIT:
                    prefill = self._planner.prefill_variant(base)
                    works.append(
                        plan_split_prefill(host, sequences, group, prefill, self.wave, padding)
                    )
                case PrefillPath.KERNEL:
                    prefill = self._planner.prefill_variant(base)
                    works += plan_prefill(host, sequences, group, window, prefill)
                case PrefillPath.GATHER:
                    for sequence in sequences.tolist():
                        chunk = plan_chunk(host, sequence, group, window, gather, num_gathered)
                        num_gathered += -(-chunk.num_tokens // ALIGNMENT) * ALIGNMENT
                        works.append(chunk)
                case _:
                    works.append(self._planner.plan(host, sequences, group, window, base, padding))
        if num_gathered:
            self._scratch.reserve(gather, num_gathered)
        return works

    def _ways(
        self, host: BatchArrays, window: int | None, variant: PrefillVariant
    ) -> list[PrefillPath | int]:
        """How each sequence is attended; those with few rows by numbers, alike where together."""
        return [
            self._chooser.choose(variant, num_rows, num_tokens, is_masked)
            if num_rows > MAX_ROWS
            else (1 if num_rows == 1 else MAX_ROWS)
            for num_rows, num_tokens, is_masked in _seen(host, window)
        ]


def _seen(host: BatchArrays, window: int | None) -> Iterator[tuple[int, int, bool]]:
    """Each sequence's rows, the tokens that any of them sees, and whether a window hides some."""
    counts = np.diff(host.query_start_loc)
    for num_rows, end in zip(counts.tolist(), host.context_lens.tolist(), strict=True):
        if window is None:
            yield num_rows, end, False
        else:
            yield num_rows, min(end, num_rows + window - 1), end > window


_Planned = Decode | SplitPrefill
_Work = _Planned | Prefill | Chunk


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that follow each other, and how they are attended."""

    rows: slice
    work: _Work


def _in_rows(works: Iterable[_Work]) -> tuple[_Part, ...]:
    """Each with its rows, which follow those of the one before."""
    parts: list[_Part] = []
    for work in works:
        row = parts[-1].rows.stop if parts else 0
        parts.append(_Part(slice(row, row + work.num_rows), work))
    return tuple(parts)


def _on_device(work: _Work) -> _Work:
    """The same with its plans on the device; those of other prompts are there already."""
    return work.with_plans(map(mx.array, work.plans)) if isinstance(work, _Planned) else work


def _only_planned(works: Iterable[_Work]) -> tuple[_Planned, ...]:
    """The same, all of them planned ahead."""
    planned: list[_Planned] = []
    for work in works:
        assert isinstance(work, _Planned), "it can't be planned ahead"
        planned.append(work)
    return tuple(planned)


@dataclass(frozen=True, slots=True)
class StepPlans:
    """What a step does in every kind of layer, where that is planned ahead.

    Attributes:
        works: For each kind of layers the plans of all rows, in their order.
    """

    works: Mapping[tuple[int, int | None, int], tuple[_Planned, ...]]

    @property
    def arrays(self) -> list[Int32Array]:
        """What differs from step to step, not on the device yet."""
        works = itertools.chain.from_iterable(self.works.values())
        return [np.asarray(plan) for work in works for plan in work.plans]

    @property
    def shape(self) -> tuple[object, ...]:
        """What must agree for two steps to be the same graph."""
        return tuple((key, *(work.shape for work in works)) for key, works in self.works.items())


def unsupported(pool: PoolShape, factor: int) -> str | None:
    """Why the kernels can't serve a layer; None when they can.

    Args:
        pool: The layer's pool.
        factor: Query heads that share a KV head.
    """
    for name, head_dim in (("K", pool.k_head_dim), ("V", pool.v_head_dim)):
        # MLX declares an array of fewer than 8 elements, such as one row, differently.
        if head_dim % 4 or not 8 <= head_dim <= 512:
            return f"head size {head_dim} of {name} must be a multiple of 4 from 8 to 512"
    if pool.block_size & (pool.block_size - 1):
        return f"block size {pool.block_size} must be a power of two"
    if factor < 1:
        return f"{factor} query heads for a KV head"
    return None
