"""How much faster the model decodes when sequences' shared tokens are attended once for all."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from pagedmlx.kv.writer import PoolWriter
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.compiled import MIN_USES
from pagedmlx.models.dummy_steps import DummySequence, make_pool, run_step
from pagedmlx.ops.cascade import CascadePath
from pagedmlx.ops.kernels import KernelBackend

NUM_OWN = 128
"""Tokens of each sequence that it doesn't share, those that the steps add among them."""

_NUM_ROUNDS = 4
"""In turns; the first one compiles, and doesn't count."""
_ROUND_S = 0.15
"""Time for the steps of a round, at least one."""
_NUM_STEPS = 12


def measure_cascade_gain(
    adapter: ModelAdapter, writer: PoolWriter, count: int, num_shared: int
) -> float:
    """Time decode steps of the whole model in both ways, dispatched as in serving.

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
    assert isinstance(adapter.backend, KernelBackend), "only the kernels have cascades"
    cascades = adapter.backend.cascades
    block_size = adapter.layout.block_size
    mx.clear_cache()  # of the last pool
    shared = np.arange(num_shared // block_size, dtype=np.int32)
    own_width = -(-NUM_OWN // block_size)
    store = make_pool(adapter, num_shared + count * own_width * block_size, writer)
    sequences = [
        DummySequence(number, np.concatenate([shared, first + np.arange(own_width)]))
        for number, first in enumerate(
            range(len(shared), len(shared) + count * own_width, own_width)
        )
    ]
    tokens = np.zeros(1, np.int32)

    def step() -> None:
        run_step(adapter, store, [(sequence, tokens) for sequence in sequences])

    before = cascades.path
    seconds: dict[CascadePath, list[float]] = {CascadePath.OFF: [], CascadePath.ON: []}
    try:
        for number in range(_NUM_ROUNDS):
            for path, times in seconds.items():
                cascades.path = path
                for sequence in sequences:
                    sequence.start = num_shared + NUM_OWN - _NUM_STEPS
                took = _seconds(step, MIN_USES + 1 if number == 0 else _NUM_STEPS)
                store.commit()
                if number:
                    times.append(took)
    finally:
        cascades.path = before
        adapter.rest()
        adapter.drop_store()
    off, on = map(min, seconds.values())
    return off / on


def _seconds(step: Callable[[], None], most: int) -> float:
    """Of a step, if some are dispatched one after the other."""
    start = time.perf_counter()
    count = 0
    while count == 0 or (count < most and time.perf_counter() - start < _ROUND_S):
        step()
        count += 1
    mx.synchronize()
    return (time.perf_counter() - start) / count
