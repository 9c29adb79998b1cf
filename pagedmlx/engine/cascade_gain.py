"""How much faster the model decodes when sequences' shared tokens are attended once for all."""

from __future__ import annotations

import time

import mlx.core as mx
import numpy as np

from pagedmlx.engine.inputs import EngineLimits
from pagedmlx.engine.memory import PoolPlan
from pagedmlx.kv.writer import PoolWriter
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.compiled import MIN_USES
from pagedmlx.models.dummy_steps import (
    DummySequence,
    made_up_tokens,
    make_pool,
    run_step,
    seconds_for,
)
from pagedmlx.models.parts import RowLayout
from pagedmlx.ops.cascade import CascadePath
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.tuning import SHAPES

_NUM_OWN = 128
"""Tokens of each sequence that it doesn't share, those that the steps add among them."""

_NUM_ROUNDS = 3
_NUM_STEPS = 12
"""Of a round: in serving, too, they are dispatched before the last one has ended."""
_ROUND_S = 0.3
_ROUNDS_S = 1.0
"""Where steps take long, rounds have fewer of them, and then there are fewer rounds."""


def shapes_to_try(
    adapter: ModelAdapter, plan: PoolPlan, limits: EngineLimits
) -> list[tuple[int, int]]:
    """Those of ``SHAPES`` that may run, and fit where the pool is going to be.

    None where each sequence runs by itself, or has a state that is known at its own end only.

    Args:
        adapter: Of the model to be served.
        plan: Of its pool.
        limits: Of its requests.
    """
    if adapter.row_layout is not RowLayout.TOKEN_ROWS or plan.state_bytes:
        return []
    block_size = limits.block_size
    return [
        (count, num_shared)
        for count, num_shared in SHAPES
        if count <= plan.max_num_seqs
        and num_shared + _NUM_OWN <= limits.max_model_len
        and (num_shared + count * _NUM_OWN) // block_size * plan.block_bytes <= plan.pool_bytes
    ]


def measure_cascade_gain(
    adapter: ModelAdapter, writer: PoolWriter, count: int, num_shared: int
) -> float:
    """Time decode steps of the whole model in both ways, in turns.

    What the device spares counts for nothing where it waits for a host that has a launch more to
    make in each layer; only whole steps tell.

    Args:
        adapter: Of the model to be served, over the kernels.
        writer: How the pool will be written.
        count: Sequences that decode.
        num_shared: Tokens with which all of them begin, whole blocks.

    Returns:
        The time of a step without, as a multiple of that with a cascade.
    """
    mx.clear_cache()  # of the last pool
    sharing = _Sharing(adapter, writer, count, num_shared)
    ways = (CascadePath.OFF, CascadePath.ON)
    cascades = sharing.backend.cascades
    before = cascades.path

    def seconds(path: CascadePath, num_steps: int) -> float:
        cascades.path = path
        return seconds_for(lambda: sharing.decode(num_steps)) / num_steps

    def fitting(path: CascadePath) -> int:
        seconds(path, 1)  # kernels are compiled, and the graph when it has come often enough
        began, took = time.perf_counter(), seconds(path, 1)
        for _ in range(MIN_USES):
            if time.perf_counter() - began > _ROUND_S:
                break
            took = seconds(path, 1)
        return max(1, min(_NUM_STEPS, int(_ROUND_S / took)))

    try:
        num_steps = {path: fitting(path) for path in ways}
        began = time.perf_counter()
        least = {path: seconds(path, num_steps[path]) for path in ways}
        for _ in range(_NUM_ROUNDS - 1):
            if time.perf_counter() - began > _ROUNDS_S:
                break
            for path in ways:
                least[path] = min(least[path], seconds(path, num_steps[path]))
    finally:
        cascades.path = before
        adapter.rest()
        adapter.drop_store()
    return least[CascadePath.OFF] / least[CascadePath.ON]


class _Sharing:
    """Sequences that begin alike, in a pool of their own; see ``measure_cascade_gain``."""

    def __init__(
        self, adapter: ModelAdapter, writer: PoolWriter, count: int, num_shared: int
    ) -> None:
        assert isinstance(adapter.backend, KernelBackend), "only the kernels have cascades"
        self.backend = adapter.backend
        self._adapter = adapter
        self._start = num_shared + _NUM_OWN - _NUM_STEPS
        block_size = adapter.layout.block_size
        num_own = -(-_NUM_OWN // block_size)
        shared = np.arange(num_shared // block_size, dtype=np.int32)
        own = len(shared) + np.arange(count * num_own, dtype=np.int32).reshape(count, num_own)
        self._store = make_pool(adapter, num_shared + own.size * block_size, writer)
        self._sequences = [
            DummySequence(number, np.concatenate([shared, table]))
            for number, table in enumerate(own)
        ]

    def decode(self, num_steps: int) -> None:
        """Start so many steps, at most ``_NUM_STEPS``, always from the same place."""
        for sequence in self._sequences:
            sequence.start = self._start
        for number in range(num_steps):
            tokens = made_up_tokens(self._adapter, len(self._sequences), number)[:, None]
            run_step(self._adapter, self._store, zip(self._sequences, tokens, strict=True))
