"""CompiledDecode: decode steps of a shape that has come before, as one compiled graph.

Building a step's graph in Python takes longer than a GPU takes to compute it, and decoding builds
the same graph over and over. Only metadata differs, and that goes in as arrays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import GroupBatch, PagedBatch

MAX_GRAPHS = 32
"""Graphs kept, the least recently used given up first."""

_MIN_USES = 3
"""A shape is compiled when it comes this often: tracing costs about ten steps."""


class Plans(Protocol):
    """A backend's plans for one step."""

    @property
    def arrays(self) -> list[mx.array]:
        """What differs between steps of one shape."""
        ...

    @property
    def shape(self) -> tuple[object, ...]:
        """What must agree for two steps to be the same graph."""
        ...


@runtime_checkable
class PlansAhead(Protocol):
    """A backend whose plans can be made before the model runs."""

    def plan_ahead(self, batch: PagedBatch) -> Any:
        """The step's plans, or None if it must take the usual way."""
        ...

    def follow(self, batch: PagedBatch, plans: Any, arrays: Sequence[mx.array]) -> None:
        """Take these plans for a batch, their arrays being given anew."""
        ...


class CompiledDecode:
    """Runs decode steps; every step of one shape after the first few is a compiled graph.

    Args:
        run: The model over a batch: writes K and V and returns logits for every row.
        backend: Plans ahead.
        store: The pool, updated in place.
    """

    def __init__(
        self, run: Callable[[PagedBatch, KVStore], mx.array], backend: PlansAhead, store: KVStore
    ) -> None:
        self._run = run
        self._backend = backend
        self._store = store
        self._graphs: OrderedDict[tuple[object, ...], Callable[..., Any]] = OrderedDict()
        self._uses: OrderedDict[tuple[object, ...], int] = OrderedDict()

    def __call__(self, batch: PagedBatch) -> mx.array | None:
        """The step's logits, or None if it must take the usual way."""
        host = batch.host
        if len(host.sample_rows) != host.num_rows:
            return None
        plans = self._backend.plan_ahead(batch)
        if plans is None:
            return None
        shape = (host.num_rows, plans.shape)
        graph = self._graph(shape, batch, plans)
        if graph is None:
            self._backend.follow(batch, plans, plans.arrays)
            return None
        logits, token = graph(
            batch.token_ids,
            batch.positions,
            self._store.token,
            *(group.slot_mapping for group in batch.groups),
            *plans.arrays,
        )
        self._store.wrote(token)
        return logits

    def _graph(
        self, shape: tuple[object, ...], batch: PagedBatch, plans: Plans
    ) -> Callable[..., Any] | None:
        graph = self._graphs.get(shape)
        if graph is not None:
            self._graphs.move_to_end(shape)
            return graph
        uses = self._uses.pop(shape, 0) + 1
        if uses < _MIN_USES:
            self._uses[shape] = uses
            if len(self._uses) > MAX_GRAPHS:
                self._uses.popitem(last=False)
            return None
        graph = self._graphs[shape] = mx.compile(self._trace(batch, plans))
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph

    def _trace(self, like: PagedBatch, plans: Plans) -> Callable[..., tuple[mx.array, mx.array]]:
        """The function to compile: a step of ``like``'s shape, from nothing but arrays."""
        num_groups = len(like.groups)

        def step(
            token_ids: mx.array, positions: mx.array, token: mx.array, *rest: mx.array
        ) -> tuple[mx.array, mx.array]:
            batch = PagedBatch(
                host=like.host,
                token_ids=token_ids,
                positions=positions,
                context_lens=like.context_lens,
                groups=tuple(
                    GroupBatch(slot_mapping=slots, block_tables=group.block_tables)
                    for slots, group in zip(rest, like.groups, strict=False)
                ),
            )
            kept = self._store.token
            self._backend.follow(batch, plans, rest[num_groups:])
            self._store.wrote(token)
            try:
                return self._run(batch, self._store), self._store.token
            finally:
                self._store.wrote(kept)

        return step
