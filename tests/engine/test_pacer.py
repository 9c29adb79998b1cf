"""A long prompt beside a running stream: the stream's gaps stay within the bound that was set."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.step import Step, StepResult
from pagedmlx.engine.outputs import Job
from pagedmlx.models.hand_over import LARGE_ROWS
from tests.support.engines import FakeRunner, make_engine

CHUNK = 2048


@dataclass
class Device:
    """It carries out steps one after the other, on a clock of its own.

    Attributes:
        step_s: What each step takes.
        token_s: And each of its tokens of prompts.
        host_s: What the host needs to dispatch a step.
        begun: How much of a large step is done before the host comes back from dispatching it.
        now: The time.
        free: When it is done with all steps.
        chunks: Tokens of prompts of the steps that were collected.
    """

    step_s: float = 0.02
    token_s: float = 0.001
    host_s: float = 0.0
    begun: float = 0.0
    now: float = 0.0
    free: float = 0.0
    chunks: list[int] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def runner(self, depth: int) -> FakeRunner:
        device = self
        ends: dict[int, float] = {}

        class Runner(FakeRunner):
            def dispatch(self, step: Step) -> None:
                super().dispatch(step)
                device.now += device.host_s
                start = max(device.now, device.free)
                took = device.step_s + device.token_s * step.num_prompt_tokens
                device.free = ends[step.step_id] = start + took
                if step.num_prompt_tokens > LARGE_ROWS and device.begun:
                    device.now = max(device.now, start + device.begun * took)

            def collect(self) -> StepResult:
                step: Step = self.under_way[0]
                device.now = max(device.now, ends[step.step_id])
                device.chunks.append(step.num_prompt_tokens)
                return super().collect()

        runner = Runner()
        runner.depth = depth
        return runner


def gaps_of_a_stream(
    device: Device, depth: int, bound_ms: int | None, num_prompt_tokens: int = 2000, **settings: int
) -> list[float]:
    """Seconds between a stream's tokens from when a prompt comes to when that has been computed."""
    engine = make_engine(
        device.runner(depth),
        max_model_len=20_000,
        clock=device.clock,
        block_size=16,
        num_blocks=2048,
        prefill_chunk_size=CHUNK,
        max_num_batched_tokens=CHUNK + 1,
        max_stream_gap_ms=bound_ms,
        **settings,
    )
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    engine.add_request(Job(prompt="hello", sampling_params=params, request_id="stream"))
    for _ in range(10):
        engine.step()
    prompt, last = "x" * num_prompt_tokens, SamplingParams(max_tokens=1)
    engine.add_request(Job(prompt=prompt, sampling_params=last, request_id="long"))
    times, is_done = [device.now], False
    while not is_done:
        for event in engine.step():
            if event.request_id == "stream":
                times.append(device.now)
            else:
                is_done = True
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stream_waits_no_longer_than_the_bound_while_a_prompt_is_computed(depth: int) -> None:
    device = Device()
    assert max(gaps_of_a_stream(device, depth, 250)) <= 0.25
    # And the prompt is not held up for nothing.
    assert max(device.chunks) >= 150
    assert sum(count > 0 for count in device.chunks) < 25


@pytest.mark.parametrize("bound_ms", [None, 0])
def test_without_a_bound_prompts_are_computed_as_fast_as_they_can(bound_ms: int | None) -> None:
    device = Device()
    gaps = gaps_of_a_stream(device, 1, bound_ms)
    assert max(device.chunks) >= 2000
    assert max(gaps) > 2.0


@pytest.mark.parametrize("bound_ms", [30, 60, 120])
@pytest.mark.parametrize("begun", [0.3, 0.5, 0.7, 0.85])
def test_a_stream_waits_no_longer_where_the_host_learns_late_that_a_step_has_ended(
    begun: float, bound_ms: int
) -> None:
    device = Device(step_s=0.005, token_s=3e-5, host_s=0.0025, begun=begun)
    gaps = gaps_of_a_stream(device, 1, bound_ms, num_prompt_tokens=16_384, chunk_multiple=CHUNK)
    assert max(gaps) <= 1.05 * bound_ms / 1000
    # Once they have grown, chunks are at least half as long as they may be: they end at round
    # positions.
    fitting = (0.9 * bound_ms / 1000 - device.step_s) / device.token_s
    num_chunks = sum(count > 0 for count in device.chunks)
    assert num_chunks <= 16_384 / min(CHUNK, fitting / 2) + 14
