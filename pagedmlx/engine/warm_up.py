"""Serves a few made-up requests before the real ones, so that nobody waits for compilers.

Kernels are compiled when they are first used, which takes from milliseconds to seconds each. A
step with prompts beside running answers needs others than either alone, and so does sampling.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from pagedmlx.config import EngineConfig
from pagedmlx.core.kv_manager import KVManager
from pagedmlx.core.request import Request
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.scheduler import Scheduler
from pagedmlx.core.step import Step
from pagedmlx.engine.runner import ModelRunner
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import PoolWriter
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.sampling.sampler import Sampler

_GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
_SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=40, n=2, max_tokens=8, ignore_eos=True, seed=0
)
_NUM_ALONE = 4
"""Steps before the second request comes."""


def serve_made_up_requests(
    adapter: ModelAdapter,
    writer: PoolWriter,
    config: EngineConfig,
    max_len: int,
    sampler: Sampler,
) -> None:
    """Answer two requests, the second of which comes while the first is being answered.

    Args:
        adapter: Of the model to be served.
        writer: How the pool will be written.
        config: Settings of the engine.
        max_len: Longest sequence that the model takes; with very few tokens nothing is done.
        sampler: Chooses their tokens.
    """
    num_outputs = _GREEDY.max_tokens or 0
    lengths = [min(length, max_len - num_outputs) for length in (24, 100)]
    if min(lengths) < 1:
        return
    groups = adapter.layout.groups
    # Three sequences, and a block to copy into for each.
    num_blocks = 3 * (1 + -(-(max(lengths) + num_outputs) // config.block_size)) + 3
    store = KVStore(adapter.layout, (num_blocks,) * len(groups), writer=writer)
    kv = KVManager(
        groups, (num_blocks,) * len(groups), config.block_size, enable_prefix_caching=False
    )
    scheduler = Scheduler(kv, config)
    runner = ModelRunner(adapter, store, sampler)
    tokens = np.random.default_rng(0).integers(0, adapter.vocab_size, sum(lengths)).tolist()
    prompts = tuple(tokens[: lengths[0]]), tuple(tokens[lengths[0] :])
    scheduler.add_request(Request("warm-up greedy", prompts[0], _GREEDY))
    under_way: deque[Step] = deque()
    num_steps = 0
    while True:
        if num_steps == _NUM_ALONE:
            scheduler.add_request(Request("warm-up sampled", prompts[1], _SAMPLED))
        num_steps += 1
        step = scheduler.schedule()
        if step is not None:
            runner.dispatch(step)
            under_way.append(step)
        elif not under_way:
            break
        if len(under_way) > (0 if step is None else runner.depth):
            under_way.popleft()
            scheduler.update(runner.collect())
    runner.rest()
    adapter.drop_store()
