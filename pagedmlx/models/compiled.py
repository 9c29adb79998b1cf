"""CompiledSteps: steps of a shape that has come before, as one compiled graph.

Building a step's graph in Python takes longer than a GPU takes to compute it, and decoding builds
the same graph over and over, short prompts behind a cached beginning often. Only metadata differs,
and that goes in as arrays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import NO_BLOCK, BatchArrays, Int32Array
from pagedmlx.kv.store import KVStore
from pagedmlx.models.hand_over import HandOver
from pagedmlx.models.layer_spans import LayerSpans
from pagedmlx.ops.base import PagedBatch
from pagedmlx.ops.launch import MIN_ELEMENTS

MAX_GRAPHS = 64
"""Graphs kept, the least recently used given up first. 64 answers of unlike lengths make 30."""

MIN_USES = 5
"""A shape is compiled when it comes this often: a trace costs what so many steps save by it."""

Graph = Callable[[mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
"""Some layers of a step, as ``CompiledSteps._function`` says."""


class Plans(Protocol):
    """A backend's plans for one step."""

    @property
    def arrays(self) -> list[Int32Array]:
        """What differs between steps of one shape, not on the device yet."""
        ...

    @property
    def shape(self) -> tuple[object, ...]:
        """What must agree for two steps to be the same graph."""
        ...


@runtime_checkable
class PlansAhead(Protocol):
    """A backend whose plans can be made before the model runs."""

    def can_plan_ahead(self, host: BatchArrays) -> bool:
        """Whether a step can be planned so."""
        ...

    def plan_ahead(self, batch: PagedBatch) -> Any:
        """The step's plans, or None if it must take the usual way."""
        ...

    def follow(self, batch: PagedBatch, plans: Any, arrays: Sequence[mx.array]) -> None:
        """Take these plans for a batch, their arrays being on the device."""
        ...


@dataclass(slots=True)
class _Graphs:
    """The steps of one shape, span by span.

    Attributes:
        graphs: One for each span of layers.
        num_compiled: So many of them, the first ones, are compiled.
    """

    graphs: list[Graph]
    num_compiled: int = 0

    def compile(self, most: int) -> None:
        """Compile the next ones, at most so many."""
        first = self.num_compiled
        self.num_compiled = min(first + most, len(self.graphs))
        for index in range(first, self.num_compiled):
            self.graphs[index] = mx.compile(self.graphs[index])


class CompiledSteps:
    """Runs steps that are planned ahead; of one shape, all but the first few by a compiled graph.

    Steps with prompts are several graphs, one for each span of layers: they come to a device that
    may be idle, and it begins with the first while MLX goes through the next. Beside streams, which
    wait meanwhile, a step traces one span: to trace all takes a third as long as the step itself.

    Args:
        run: The model over a batch: writes K and V and returns logits.
        backend: Plans ahead.
        store: The pool, updated in place.
        spans: Of the model's layers.
        hand_over: Gives the device each span.
    """

    def __init__(
        self,
        run: Callable[[PagedBatch, KVStore], mx.array],
        backend: PlansAhead,
        store: KVStore,
        spans: LayerSpans,
        hand_over: HandOver,
    ) -> None:
        self._run = run
        self._backend = backend
        self._store = store
        self._spans = spans
        self._hand_over = hand_over
        self._graphs: OrderedDict[tuple[object, ...], _Graphs] = OrderedDict()
        self._uses: OrderedDict[tuple[object, ...], int] = OrderedDict()

    def __call__(self, batch: PagedBatch) -> mx.array | None:
        """The step's logits as in ``ModelOutput``; None if it must take the usual way."""
        host = batch.host
        if not host.only_samples:
            return None
        plans = self._backend.plan_ahead(batch)
        if plans is None:
            return None
        metadata = _Metadata.of(batch, plans)
        graphs = self._graphs_of((metadata, plans.shape), batch, plans)
        if graphs is None:
            self._backend.follow(batch, plans, [mx.array(array) for array in plans.arrays])
            return None
        token_ids, packed = batch.token_ids, metadata.packed(host, plans)
        if not host.only_decodes:
            token_ids, packed = _brought(token_ids, packed)
        hidden = token_ids  # the first layers look at no others
        for number, graph in enumerate(graphs):
            if number:
                self._hand_over.give(hidden)
            hidden, token = graph(token_ids, packed, hidden, self._store.token)
            self._store.wrote(token)
        return hidden

    def drop(self) -> None:
        """Forget all graphs, and with them the pool's arrays that they hold, at once.

        They refer to this object, so without a word they would live until Python looks for circles.
        Shapes that had one get it again when they come once more.
        """
        self._uses |= dict.fromkeys(self._graphs, MIN_USES - 1)
        self._graphs.clear()

    def _graphs_of(
        self, shape: tuple[object, ...], batch: PagedBatch, plans: Plans
    ) -> list[Graph] | None:
        found = self._graphs.get(shape)
        if found is None:
            uses = self._uses.pop(shape, 0) + 1
            if uses < MIN_USES:
                self._uses[shape] = uses
                if len(self._uses) > MAX_GRAPHS:
                    self._uses.popitem(last=False)
                return None
            spans = (self._spans.whole,) if batch.host.only_decodes else self._spans.parts
            found = _Graphs([self._function(batch, plans, span) for span in spans])
        self._graphs[shape] = found
        self._graphs.move_to_end(shape)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        found.compile(1 if batch.host.num_decodes else len(found.graphs))
        return found.graphs

    def _function(self, like: PagedBatch, plans: Plans, span: range) -> Graph:
        """Some layers of a step of ``like``'s shape, to be compiled or called as it is.

        It takes the step's token ids, the other metadata, what the layers before have come to, if
        there are any, and the newest token of the pool. It gives what these layers come to, or
        logits, and the next token of the pool.
        """
        metadata = _Metadata.of(like, plans)
        # A graph outlives the sequences of the step that it was made for.
        host = replace(like.host, sequences=(), sample_sequences=(), unread_sequences=())
        num_padding = like.num_padding

        def step(
            token_ids: mx.array, packed: mx.array, hidden: mx.array, token: mx.array
        ) -> tuple[mx.array, mx.array]:
            slots, positions, sample_rows, arrays = metadata.unpacked(packed)
            batch = PagedBatch(host, num_padding, is_traced=True).given(
                token_ids=token_ids,
                positions=positions,
                sample_rows=sample_rows,
                slot_mappings=slots,
            )
            kept = self._store.token
            self._backend.follow(batch, plans, arrays)
            self._store.wrote(token)
            try:
                output = self._spans.run(span, hidden, lambda: self._run(batch, self._store))
                return output, self._store.token
            finally:
                self._store.wrote(kept)

        return step


def _brought(token_ids: mx.array, packed: mx.array) -> tuple[mx.array, mx.array]:
    """The same on their way to the device now: on CUDA, what first reads them waits for that."""
    brought = token_ids | token_ids, packed | packed
    mx.async_eval(*brought)
    return brought


@dataclass(frozen=True, slots=True)
class _Metadata:
    """How all that differs between steps lies in one array: what is new costs per array.

    Attributes:
        num_rows: P, as in ``PagedBatch``.
        num_groups: KV groups.
        num_samples: Rows whose logits are needed; 0 if these are all that are no padding.
        sizes: Elements of the plans' arrays.
    """

    num_rows: int
    num_groups: int
    num_samples: int
    sizes: tuple[int, ...]

    @staticmethod
    def of(batch: PagedBatch, plans: Plans) -> _Metadata:
        """The layout for a step."""
        host = batch.host
        num_samples = len(host.sample_rows) if len(host.sample_rows) < host.num_rows else 0
        sizes = tuple(array.size for array in plans.arrays)
        return _Metadata(batch.num_rows, len(host.groups), num_samples, sizes)

    def packed(self, host: BatchArrays, plans: Plans) -> mx.array:
        """A step's slots (in 64 bits, so first), positions, rows to sample and plans: int32."""
        slots = np.full((self.num_groups, self._width), NO_BLOCK, np.int64)
        for row, group in zip(slots, host.groups, strict=True):
            row[: host.num_rows] = group.slot_mapping
        positions = np.zeros(self._width, np.int32)
        positions[: host.num_rows] = host.positions
        samples = host.sample_rows[: self.num_samples]
        parts = [slots.ravel().view(np.int32), positions, samples, *plans.arrays]
        return mx.array(np.concatenate(parts))

    def unpacked(
        self, packed: mx.array
    ) -> tuple[list[mx.array], mx.array, mx.array | None, list[mx.array]]:
        """Views of each group's slots, the positions, the rows to sample, and each plan."""
        width, samples = self._width, [self.num_samples] if self.num_samples else []
        ends = np.cumsum([*[2 * width] * self.num_groups, width, *samples, *self.sizes])
        parts = iter(mx.split(packed, ends[:-1].tolist()))
        slots = [next(parts).view(mx.int64) for _ in range(self.num_groups)]
        return slots, next(parts), next(parts) if samples else None, list(parts)

    @property
    def _width(self) -> int:
        return max(self.num_rows, MIN_ELEMENTS)
