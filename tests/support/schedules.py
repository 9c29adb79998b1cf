"""What tests of the scheduler share: prompts, and what a step ran."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from pagedmlx.core.sequence import SequenceStatus
from pagedmlx.core.step import Step
from tests.support.core import Driver

SYSTEM = tuple(range(100, 116))


def tokens(count: int, first: int = 10) -> tuple[int, ...]:
    """A prompt that shares nothing with one of another ``first``."""
    return tuple(range(first, first + count))


def run_and_check(driver: Driver, max_steps: int = 1000) -> None:
    driver.run(max_steps)
    driver.check_outputs()
    driver.check_empty()


def scheduled_ids(step: Step | None) -> list[int]:
    assert step is not None
    return [entry.sequence.seq_id for entry in step.scheduled]


def prompt_tokens(driver: Driver) -> dict[str, int]:
    """Prompt tokens of the next step by request."""
    step = driver.step()
    assert step is not None
    return {e.sequence.request.request_id: e.num_prompt_tokens for e in step.scheduled}


@contextmanager
def first_prompt_gets_on(driver: Driver) -> Generator[None]:
    """Around one step: the first running prompt has a share, whoever else wants one.

    It has none where one token of each stream is the whole budget, and where it lacks blocks: then
    it loses its own, or waits for a step under way.
    """
    running = driver.scheduler.running
    first = next((each for each in running if each.num_left > 1), None)
    num_streams = sum(each.num_left <= 1 for each in running)
    num_computed = 0 if first is None else first.num_computed_tokens
    num_steps, may_wait = len(driver.steps), bool(driver.flying)
    yield
    steps = driver.steps[num_steps:]
    budget = driver.config.max_num_batched_tokens
    if first is None or first.status is not SequenceStatus.RUNNING or num_streams >= budget:
        return
    num_blocks = budget // driver.kv.block_size + 2
    is_full = any(
        pool.num_free_blocks + pool.num_cached_blocks < num_blocks for pool in driver.kv.pools
    )
    if may_wait and (is_full or not steps or steps[0].preempted):
        return
    assert first.num_computed_tokens > num_computed, "the first prompt had nothing of a step"
