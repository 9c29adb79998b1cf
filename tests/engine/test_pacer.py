"""A long prompt beside a running stream: the stream's gaps stay within the bound that was set."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.step import Step, StepResult
from pagedmlx.engine.outputs import Job
from tests.support.engines import FakeRunner, make_engine

STEP_S = 0.02
TOKEN_S = 0.001


@dataclass
class SlowDevice:
    """Its clock goes on as steps are carried out, one after the other."""

    now: float = 0.0
    chunks: list[int] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def runner(self, depth: int) -> FakeRunner:
        device = self

        class Runner(FakeRunner):
            def collect(self) -> StepResult:
                step: Step = self.under_way[0]
                device.now += STEP_S + TOKEN_S * step.num_tokens
                device.chunks.append(step.num_prompt_tokens)
                return super().collect()

        runner = Runner()
        runner.depth = depth
        return runner


def gaps_of_a_stream(depth: int, max_stream_gap_ms: int | None) -> tuple[list[float], SlowDevice]:
    device = SlowDevice()
    engine = make_engine(
        device.runner(depth),
        max_model_len=4096,
        clock=device.clock,
        num_blocks=1024,
        prefill_chunk_size=2048,
        max_num_batched_tokens=2048,
        max_stream_gap_ms=max_stream_gap_ms,
    )
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    engine.add_request(Job(prompt="hello", sampling_params=params, request_id="stream"))
    for _ in range(10):
        engine.step()
    engine.add_request(
        Job(prompt="x" * 2000, sampling_params=SamplingParams(max_tokens=2), request_id="long")
    )
    times: list[float] = []
    while engine.has_unfinished:
        times += [device.now for event in engine.step() if event.request_id == "stream"]
    return [after - before for before, after in pairwise(times)], device


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stream_waits_no_longer_than_the_bound_while_a_prompt_is_computed(depth: int) -> None:
    gaps, device = gaps_of_a_stream(depth, 250)
    assert max(gaps) <= 0.25
    # And the prompt is not held up for nothing.
    assert max(device.chunks) >= 150
    assert sum(count > 0 for count in device.chunks) < 25


@pytest.mark.parametrize("bound", [None, 0])
def test_without_a_bound_prompts_are_computed_as_fast_as_they_can(bound: int | None) -> None:
    gaps, device = gaps_of_a_stream(1, bound)
    assert max(device.chunks) >= 2000
    assert max(gaps) > 2.0
