"""Counters: what the scheduler counts as it goes, and the snapshot that it makes of it."""

from __future__ import annotations

from dataclasses import dataclass

from pagedmlx.core.kv_manager import KVManager
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.stats import EngineStats
from pagedmlx.core.step import Step


@dataclass(slots=True)
class Counters:
    """Counts since the start, named and meant as in ``EngineStats``.

    Attributes:
        num_waiting_steps: Steps in which some sequence waited for blocks.
        waiting_fill: Sum of the shares of blocks in use in those steps.
    """

    num_requests: int = 0
    num_finished_requests: int = 0
    num_waits: int = 0
    num_overtakes: int = 0
    num_preemptions: int = 0
    num_deferrals: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    max_waste_slots: int = 0
    num_waiting_steps: int = 0
    waiting_fill: float = 0.0

    def note_step(self, step: Step, block_size: int) -> None:
        """Count a step that is about to run."""
        self.num_steps += 1
        self.num_computed_tokens += step.num_tokens
        for entry in step.scheduled:
            waste = _waste_slots(entry.sequence, block_size)
            if waste > self.max_waste_slots:
                self.max_waste_slots = waste

    def note_wait(self, kv: KVManager) -> None:
        """Count a step in which some sequence waits for blocks."""
        self.num_waiting_steps += 1
        self.waiting_fill += max(pool.num_used_blocks / pool.num_blocks for pool in kv.pools)

    def snapshot(
        self, kv: KVManager, running: list[Sequence], waiting: list[Sequence]
    ) -> EngineStats:
        """Everything at this moment; bytes are the engine's to fill in."""
        pool = min(kv.pools, key=lambda pool: pool.num_available_blocks)
        steps = self.num_waiting_steps
        return EngineStats(
            block_size=kv.block_size,
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_shared_blocks=pool.num_shared_blocks,
            peak_used_blocks=max(pool.peak_used_blocks for pool in kv.pools),
            num_running=len(running),
            num_waiting=len(waiting),
            num_requests=self.num_requests,
            num_finished_requests=self.num_finished_requests,
            num_waits=self.num_waits,
            num_overtakes=self.num_overtakes,
            num_preemptions=self.num_preemptions,
            num_deferrals=self.num_deferrals,
            num_evictions=sum(pool.num_evictions for pool in kv.pools),
            num_copies=kv.num_copies,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_output_tokens=self.num_output_tokens,
            waste_slots=sum(_waste_slots(sequence, kv.block_size) for sequence in running),
            max_waste_slots=self.max_waste_slots,
            num_waiting_steps=steps,
            mean_fill_while_waiting=self.waiting_fill / steps if steps else None,
        )


def _waste_slots(sequence: Sequence, block_size: int) -> int:
    """Slots that a sequence holds and hasn't filled."""
    return len(sequence.block_tables[0]) * block_size - sequence.num_computed_tokens
