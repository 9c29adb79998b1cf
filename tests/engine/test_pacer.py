"""A long prompt beside a running stream: the stream's gaps stay within the bound that was set."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from pagedmlx.core.pace import PrefillPace, StepShare
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.step import Step, StepResult
from pagedmlx.engine.outputs import Job
from pagedmlx.engine.pacer import Pacer
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
    fitting = (0.75 * bound_ms / 1000 - device.step_s) / device.token_s
    num_chunks = sum(count > 0 for count in device.chunks)
    assert num_chunks <= 16_384 / min(CHUNK, fitting / 2) + 14


@pytest.mark.parametrize("step_s", [0.002, 0.02])
@pytest.mark.parametrize("token_s", [1e-5, 1e-4])
@pytest.mark.parametrize("host_s", [0.001, 0.03])
@pytest.mark.parametrize("begun", [0.0, 0.3, 0.9])
def test_no_host_and_no_device_make_the_pace_run_away(
    begun: float, host_s: float, token_s: float, step_s: float
) -> None:
    for bound_ms in (30, 120):
        device = Device(step_s=step_s, token_s=token_s, host_s=host_s, begun=begun)
        gaps = gaps_of_a_stream(device, 1, bound_ms, num_prompt_tokens=16_384, chunk_multiple=CHUNK)
        assert max(gaps) <= 1.5 * max(bound_ms / 1000, 2 * step_s, 2 * host_s)


def test_where_even_few_tokens_break_the_bound_prompts_get_all_that_cost_no_more() -> None:
    device = Device(step_s=0.04, token_s=1e-5, host_s=0.04)
    gaps = gaps_of_a_stream(device, 1, 1, cheap_tokens=128)
    assert sum(count > 0 for count in device.chunks) <= 2 + 2000 / 128
    assert max(gaps) < 0.05


class Recording:
    """A pacer with a clock that is set by hand, and what its pace is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10.0
        self.told: list[tuple[list[StepShare], float]] = []
        monkeypatch.setattr(
            PrefillPace, "note", lambda _, *told: self.told.append((told[0], round(told[1], 6)))
        )
        self.pacer = Pacer(0.1, 16, lambda: self.now)
        self._steps: dict[int, Any] = {}

    def start(self, step_id: int, num_prompt_tokens: int, at: float) -> None:
        self.now = at
        self._steps[step_id] = OneStep(step_id, num_prompt_tokens)
        self.pacer.start(self._steps[step_id])

    def end(self, step_id: int, at: float, waits_since: float | None = None) -> None:
        self.now = at if waits_since is None else waits_since
        self.pacer.wait()
        self.now = at
        self.pacer.end(self._steps[step_id])


@dataclass
class OneStep:
    step_id: int
    num_prompt_tokens: int


def test_a_step_that_was_waited_for_is_measured_from_the_end_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Recording(monkeypatch)
    record.start(1, 0, at=11.0)
    record.start(2, 100, at=11.1)
    record.end(1, at=12.0, waits_since=11.2)
    record.start(3, 50, at=12.1)
    record.end(2, at=14.0, waits_since=12.2)
    assert record.told == [([(0, 1.0)], 1.0), ([(100, 1.0)], 2.0)]


def test_one_that_was_not_is_measured_with_half_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Recording(monkeypatch)
    record.start(1, 0, at=11.0)
    record.start(2, 100, at=11.1)
    record.end(1, at=12.0)
    record.start(3, 50, at=12.1)
    record.end(2, at=14.0, waits_since=13.95)  # that is to read it
    record.end(3, at=15.0, waits_since=14.0)
    assert record.told == [
        ([(0, 1.0), (100, 0.5)], 1.0),
        ([(100, 0.5), (50, 0.5)], 2.0),
        ([(50, 0.5)], 1.0),
    ]


def test_the_last_one_is_measured_alone_and_idle_time_is_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Recording(monkeypatch)
    record.start(1, 7, at=11.0)
    record.end(1, at=12.0)
    record.start(2, 9, at=100.0)
    record.end(2, at=100.5)
    assert record.told == [([(7, 1.0)], 1.0), ([(9, 1.0)], 0.5)]
