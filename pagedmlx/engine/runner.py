"""ModelRunner: carries out steps on the device and brings the sampled tokens back."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import BatchArrays, build_batch
from pagedmlx.core.step import Step, StepResult
from pagedmlx.kv.store import KVStore
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.ops.base import PagedBatch
from pagedmlx.sampling.chooser import Chosen, TokenChooser
from pagedmlx.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    """A step that the device may still be busy with.

    Attributes:
        step_id: The step's.
        chosen: Its tokens.
        pooled_ids: Sequences that embeddings are made of.
        pooled: (E, D) float32 for them; None if there are none.
    """

    step_id: int
    chosen: Chosen
    pooled_ids: tuple[int, ...]
    pooled: mx.array | None


class ModelRunner:
    """Copies blocks, runs the model over all rows of a step, samples.

    Where the pool is updated in place, the next step starts before this one's tokens are read:
    they go to it on the device, so that the device never waits for Python.

    Args:
        adapter: The model.
        store: The pool's arrays.
        sampler: Chooses tokens.
        on_close: Called when model and pool are dropped.

    Attributes:
        depth: How many steps may be under way when another one is dispatched.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        store: KVStore,
        sampler: Sampler,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._adapter = adapter
        self._on_close = on_close
        self._store = store
        self._chooser = TokenChooser(sampler)
        self._under_way: deque[_UnderWay] = deque()
        self._last_taken: tuple[list[int], mx.array] = [], mx.zeros(0, mx.int32)
        self.depth = 1 if store.updates_in_place else 0

    def dispatch(self, step: Step) -> None:
        """Start a step; where the pool is updated functionally, it is done on return."""
        self._store.states.drop(step.freed)
        self._chooser.drop(step.freed)
        host = build_batch(step, self._store.layout.block_size)
        for group, arrays in enumerate(host.groups):
            self._store.check(group, arrays)
            self._store.copy_blocks(group, arrays.copy_src, arrays.copy_dst)
        batch = self._batch(host)
        output = self._adapter.run(batch, self._store)
        chosen = self._chooser.choose(output.logits, host, batch.token_ids)
        pooled = [] if output.pooled is None else [output.pooled]
        self._store.submit(*chosen.arrays, *pooled)
        ids = tuple(each.sequence.seq_id for each in host.pooled)
        self._under_way.append(_UnderWay(step.step_id, chosen, ids, output.pooled))

    def collect(self) -> StepResult:
        """Wait for the oldest step under way.

        Returns:
            The new tokens; ``INVALID_TOKEN`` where a row's logits were not finite, or where all
            tokens were forbidden. And what embeddings are made of.
        """
        step = self._under_way.popleft()
        result = self._chooser.read(step.step_id, step.chosen)
        if step.pooled is None:
            return result
        pooled = zip(step.pooled_ids, np.array(step.pooled), strict=True)
        return replace(result, pooled=dict(pooled))

    def rest(self) -> None:
        """No sequence is left: forget what was kept for any."""
        self._chooser.clear()
        self._store.states.clear()
        self._adapter.rest()

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool's arrays now."""
        return self._store.num_bytes

    def has_room(self, num_blocks: tuple[int, ...]) -> bool:
        """Whether the pool's arrays hold so many blocks of each group."""
        return all(self._store.has_room(group, count) for group, count in enumerate(num_blocks))

    def grow(self, num_blocks: tuple[int, ...], num_ahead: tuple[int, ...]) -> None:
        """Let the pool grow where it has no room.

        That copies the pool and waits for the device, so it pays to do it seldom.

        Args:
            num_blocks: Blocks of each group that are needed at once.
            num_ahead: Blocks of each group that will be needed as far as anybody knows. As long as
                there is memory for it, the arrays get that long, or twice as long as they are.

        Raises:
            RuntimeError: The device has no memory even for what is needed at once.
        """
        for group, (needed, ahead) in enumerate(zip(num_blocks, num_ahead, strict=True)):
            if not self._store.has_room(group, needed):
                self._grow(group, needed, ahead)

    def _grow(self, group: int, needed: int, ahead: int) -> None:
        doubled = max(needed, 2 * self._store.num_blocks[group])
        for num_blocks in sorted({doubled, max(doubled, ahead)}, reverse=True):
            with suppress(RuntimeError):  # MLX's, of memory
                self._fit(group, num_blocks)
                return
        self._fit(group, needed)

    def has_spare(self, num_blocks: tuple[int, ...]) -> bool:
        """Whether ``shrink`` would give anything back."""
        return any(
            self._store.has_room(group, count) and not self._store.fits(group, count)
            for group, count in enumerate(num_blocks)
        )

    def shrink(self, num_blocks: tuple[int, ...]) -> None:
        """Give back what lies behind so many blocks of each group, in whole slabs."""
        for group, count in enumerate(num_blocks):
            if self._store.has_room(group, count):
                self._fit(group, count)

    def _fit(self, group: int, num_blocks: int) -> None:
        if not self._store.fits(group, num_blocks):
            self._adapter.drop_graphs()
            self._store.fit(group, num_blocks)

    def _batch(self, host: BatchArrays) -> PagedBatch:
        """A step for the device, with the tokens that only the device knows."""
        batch = self._adapter.batch(host, self._store)
        if not host.unread_sequences:
            return batch
        before = self._under_way[-1].chosen
        places = [before.places[sequence.seq_id] for sequence in host.unread_sequences]
        knows_none = len(places) == host.num_rows
        if knows_none:
            places += places[:1] * batch.num_padding  # padding has some token too
        tokens = _some_token(before.tokens)
        if places != list(range(len(tokens))):
            tokens = tokens[self._on_device(places)]
        if not knows_none:
            known = batch.token_ids
            known[mx.array(host.unread_rows)] = tokens
            tokens = known
        return batch.given(token_ids=tokens)

    def _on_device(self, places: list[int]) -> mx.array:
        """Places as indexes, which are often those of the step before."""
        if self._last_taken[0] != places:
            self._last_taken = places, mx.array(places)
        return self._last_taken[1]

    def close(self) -> None:
        """Drop model and pool and give their memory back; the runner can't be used any more."""
        self._adapter.close()
        self._on_close()
        self._under_way.clear()
        del self._adapter, self._store
        release_mlx()


# Compiled, so that the constant needs no memory, which would come to the device at every step.
@partial(mx.compile, shapeless=True)
def _some_token(tokens: mx.array) -> mx.array:
    """A row whose logits were not finite ends with this step; any token will do for it."""
    return mx.maximum(tokens, 0)


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
