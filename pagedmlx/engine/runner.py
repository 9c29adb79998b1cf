"""ModelRunner: carries out one Step on the device and brings the sampled tokens back."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import build_batch
from pagedmlx.core.step import Step, StepResult
from pagedmlx.kv.store import KVStore
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.ops.base import upload
from pagedmlx.sampling.sampler import Sampler, SampleRow


class ModelRunner:
    """Copies blocks, runs the model over all rows of a step, samples.

    Args:
        adapter: The model.
        store: The pool's arrays.
        sampler: Chooses tokens.
    """

    def __init__(self, adapter: ModelAdapter, store: KVStore, sampler: Sampler) -> None:
        self._adapter = adapter
        self._store = store
        self._sampler = sampler

    def run(self, step: Step) -> StepResult:
        """Compute a step and wait for it.

        Returns:
            The new tokens; ``INVALID_TOKEN`` where a row's logits were not finite.
        """
        host = build_batch(step, self._store.layout.block_size)
        for group, arrays in enumerate(host.groups):
            self._store.check(group, arrays)
            self._store.copy_blocks(group, arrays.copy_src, arrays.copy_dst)
        logits = self._adapter.forward(upload(host), self._store)
        rows = [
            SampleRow(s.request.params, s.request.seed, s.index, s.num_tokens)
            for s in host.sample_sequences
        ]
        if not rows:
            self._store.commit(logits)
            return StepResult(step.step_id, {})
        tokens = self._sampler.sample(logits, rows)
        self._store.commit(tokens)
        sampled = np.array(tokens).tolist()
        ids = (sequence.seq_id for sequence in host.sample_sequences)
        return StepResult(step.step_id, dict(zip(ids, sampled, strict=True)))

    def close(self) -> None:
        """Drop model and pool and give their memory back; the runner can't be used any more."""
        self._adapter.close()
        del self._adapter, self._store
        release_mlx()


def release_mlx() -> None:
    """Give back what MLX holds for dead objects, and this thread's streams.

    Without the latter the process aborts when it exits (MLX 0.32, streams made off the main
    thread). Nothing more can be computed on this thread afterwards.
    """
    # Modules and their hooks refer to each other in circles.
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.clear_streams()
