from __future__ import annotations

import gc
import logging
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.step import Step
from pagedmlx.engine.engine import Engine
from pagedmlx.engine.outputs import Job, OutputEvent
from pagedmlx.engine.worker import EngineWorker
from pagedmlx.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    PoolTooSmallError,
    RequestFailedError,
)
from tests.support.engines import FakeRunner, assert_idle, make_engine

pytestmark = pytest.mark.usefixtures("depth")

WAIT_S = 60.0
Start = Callable[..., EngineWorker]


@pytest.fixture
def start() -> Iterator[Start]:
    workers: list[EngineWorker] = []

    def begin(build: Callable[[], Engine] = make_engine) -> EngineWorker:
        worker = EngineWorker(lambda _report: build())
        workers.append(worker)
        worker.start().result(WAIT_S)
        return worker

    yield begin
    for worker in workers:
        worker.close(WAIT_S)
        assert not worker._thread.is_alive()


def job(request_id: str, max_tokens: int = 12, n: int = 1, prompt: str = "hello") -> Job:
    params = SamplingParams(max_tokens=max_tokens, n=n, seed=1)
    return Job(prompt=prompt, request_id=request_id, sampling_params=params)


class Listener:
    """Keeps one request's events, and says when all its outputs have ended."""

    def __init__(self, worker: EngineWorker, job: Job) -> None:
        self.events: list[OutputEvent] = []
        self.ended = threading.Event()
        self._num_open = job.sampling_params.n
        worker.submit(worker.prepare(job), self.receive)

    def receive(self, event: OutputEvent) -> None:
        self.events.append(event)
        if event.finish_reason is not None:
            self._num_open -= 1
            if self._num_open == 0:
                self.ended.set()

    def wait(self) -> list[OutputEvent]:
        assert self.ended.wait(WAIT_S), "the request never ended"
        return self.events


class Gate:
    """Holds the engine before a step until it is opened."""

    def __init__(self, at_step: int = 0) -> None:
        self.at_step = at_step
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, step: Step) -> None:
        if step.step_id >= self.at_step:
            self.reached.set()
            assert self.opened.wait(WAIT_S)


def fail_at(step_id: int) -> Callable[[Step], None]:
    def check(step: Step) -> None:
        if step.step_id == step_id:
            raise RuntimeError("the device is gone")

    return check


def test_requests_from_many_threads_all_end(start: Start):
    worker = start()
    with ThreadPoolExecutor(8) as threads:
        listeners = list(threads.map(lambda i: Listener(worker, job(str(i))), range(40)))
    for listener in listeners:
        assert sum(len(event.token_ids) for event in listener.wait()) == 12
    engine = worker.engine
    worker.call(lambda: assert_idle(engine)).result(WAIT_S)
    assert not worker._subscribers


def test_an_abort_from_another_thread_may_race_with_the_end(start: Start):
    worker = start(lambda: make_engine(num_blocks=16))
    engine = worker.engine
    rng = random.Random(2)
    outcomes: set[str | None] = set()
    for number in range(500):
        name = f"r{number % 7}"
        listener = Listener(worker, job(name, rng.randint(1, 3), rng.choice((1, 3)), "x"))
        for _ in range(rng.randint(0, 60)):
            pass
        if rng.random() < 0.5:
            worker.call(lambda: None).result(WAIT_S)
        worker.abort(name, listener.receive)
        reasons = [e.finish_reason for e in listener.wait() if e.finish_reason is not None]
        outcomes.update(reasons)
    assert outcomes <= {"abort", "length"}
    worker.call(lambda: assert_idle(engine)).result(WAIT_S)
    assert not worker._subscribers


def test_an_abort_reaches_only_the_request_of_the_same_receiver(start: Start):
    gate = Gate()
    worker = start(lambda: make_engine(FakeRunner(before_step=gate)))
    first = Listener(worker, job("a"))
    assert gate.reached.wait(WAIT_S)
    refused = Listener(worker, job("a"))
    worker.abort("a", refused.receive)
    gate.opened.set()
    (event,) = refused.wait()
    assert isinstance(event.error, InvalidRequestError)
    assert first.wait()[-1].finish_reason == "length"


def test_a_refused_request_is_told_for_every_output_and_the_next_one_runs(start: Start):
    worker = start(lambda: make_engine(num_blocks=4))
    events = Listener(worker, job("big", max_tokens=20, n=2)).wait()
    assert [event.index for event in events] == [0, 1]
    assert all(isinstance(event.error, PoolTooSmallError) for event in events)
    assert Listener(worker, job("small", max_tokens=2)).wait()[-1].finish_reason == "length"


def test_a_fault_while_adding_is_the_requests_own(start: Start, caplog: pytest.LogCaptureFixture):
    worker = start()
    engine = worker.engine
    engine.add_request = lambda _job: 1 / 0  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.CRITICAL):
        (event,) = Listener(worker, job("a")).wait()
    assert isinstance(event.error, RequestFailedError)
    del engine.add_request  # type: ignore[method-assign]
    assert Listener(worker, job("b")).wait()[-1].finish_reason == "length"


@pytest.mark.parametrize("step_id", [0, 1, 7])
def test_when_the_loop_fails_every_open_output_ends_and_nobody_hangs(
    start: Start, step_id: int, caplog: pytest.LogCaptureFixture
):
    gate = Gate()

    def before(step: Step) -> None:
        gate(step)
        fail_at(step_id)(step)

    runner = FakeRunner(before_step=before)
    worker = start(lambda: make_engine(runner, num_blocks=16))
    listeners = [Listener(worker, job(f"r{i}", 14, n)) for i, n in enumerate((1, 3, 2, 1))]
    queued = worker.call(lambda: "done")
    gate.opened.set()
    for listener in listeners:
        last = {event.index: event for event in listener.wait()}
        assert all(event.finish_reason == "error" for event in last.values())
        for event in last.values():
            assert isinstance(event.error, EngineDeadError)
            assert "RuntimeError: the device is gone" in str(event.error)
        ends = [e.index for e in listener.events if e.finish_reason is not None]
        assert sorted(ends) == sorted(set(ends))
    assert queued.result(WAIT_S) == "done"
    with pytest.raises(EngineDeadError, match="the device is gone"):
        worker.prepare(job("late"))
    with pytest.raises(EngineDeadError):
        worker.call(lambda: None)
    worker.abort("r0", listeners[0].receive)
    worker.close(WAIT_S)
    assert not worker._thread.is_alive()
    assert isinstance(worker.failure, EngineDeadError)
    assert runner.num_closes == 1
    assert "the device is gone" in caplog.text


def test_outputs_that_ended_before_the_loop_failed_keep_their_end(start: Start):
    def choose(sequence: Any) -> int:
        return 2 if sequence.index == 0 and sequence.num_output_tokens == 1 else 10

    worker = start(lambda: make_engine(FakeRunner(choose, before_step=fail_at(6))))
    events = Listener(worker, job("a", 50, n=3)).wait()
    ends = {event.index: event.finish_reason for event in events if event.finish_reason}
    assert ends == {0: "stop", 1: "error", 2: "error"}


def test_a_failed_loop_keeps_nothing_alive_through_its_traceback(start: Start):
    class Heavy:
        pass

    references: list[weakref.ref[Heavy]] = []

    def explode(step: Step) -> None:
        heavy = Heavy()
        references.append(weakref.ref(heavy))
        raise RuntimeError("boom")

    worker = start(lambda: make_engine(FakeRunner(before_step=explode)))
    (event,) = Listener(worker, job("a")).wait()
    worker.close(WAIT_S)
    gc.collect()
    assert event.error is not None
    assert worker.failure is not None
    assert references[0]() is None


def test_an_integrity_error_ends_the_loop_and_says_so(start: Start):
    worker = start()
    engine = worker.engine
    worker.call(lambda: engine._live.update(ghost=None)).result(WAIT_S)  # type: ignore[arg-type]
    (event,) = Listener(worker, job("a")).wait()[-1:]
    assert isinstance(event.error, EngineDeadError)
    assert "records of requests" in str(event.error)


def test_a_load_that_fails_says_why_and_ends_the_thread():
    def build(_report: object) -> Engine:
        raise ModelLoadError("no weights")

    worker = EngineWorker(build)
    queued = worker.call(lambda: None)
    with pytest.raises(ModelLoadError, match="no weights"):
        worker.start().result(WAIT_S)
    worker._thread.join(WAIT_S)
    assert not worker._thread.is_alive()
    queued.result(WAIT_S)
    with pytest.raises(EngineClosedError):
        worker.call(lambda: None)
    worker.close()


def test_closing_while_it_loads_ends_the_loading_at_its_next_report():
    started, go_on = threading.Event(), threading.Event()
    told: list[str] = []

    def build(report: Callable[[str, float | None], None]) -> Engine:
        report("first", None)
        started.set()
        assert go_on.wait(WAIT_S)
        report("second", 0.5)
        raise AssertionError("went on loading")

    worker = EngineWorker(build, lambda what, _share: told.append(what))
    loaded = worker.start()
    assert started.wait(WAIT_S)
    assert not loaded.cancel()
    worker.close(timeout_s=0.0)
    go_on.set()
    with pytest.raises(EngineClosedError):
        loaded.result(WAIT_S)
    worker.close(WAIT_S)
    assert not worker._thread.is_alive()
    assert told == ["first"]


def test_close_ends_open_requests_with_abort_and_refuses_what_is_queued(start: Start):
    gate = Gate(at_step=2)
    runner = FakeRunner(before_step=gate)
    worker = start(lambda: make_engine(runner, num_blocks=8))
    listeners = [Listener(worker, job("runs", 20)), Listener(worker, job("waits", 20, n=2))]
    assert gate.reached.wait(WAIT_S)
    queued = Listener(worker, job("queued", 20))
    worker.close(timeout_s=0.0)
    gate.opened.set()
    for listener in listeners:
        reasons = [e.finish_reason for e in listener.wait() if e.finish_reason]
        assert set(reasons) == {"abort"}
    (event,) = queued.wait()
    assert isinstance(event.error, EngineClosedError)
    worker.close(WAIT_S)
    worker.close(WAIT_S)
    assert not worker._thread.is_alive()
    assert runner.num_closes == 1
    with pytest.raises(EngineClosedError):
        worker.prepare(job("late"))
    worker.abort("runs", listeners[0].receive)


def test_a_receiver_that_fails_loses_only_its_own_request(
    start: Start, caplog: pytest.LogCaptureFixture
):
    worker = start()
    engine = worker.engine

    def fail(_event: OutputEvent) -> None:
        raise ValueError("client is gone")

    with caplog.at_level(logging.ERROR):
        worker.submit(worker.prepare(job("bad", 50, n=2)), fail)
        assert Listener(worker, job("good")).wait()[-1].finish_reason == "length"
    worker.call(lambda: assert_idle(engine)).result(WAIT_S)
    assert caplog.text.count("the receiver of request bad failed") == 1


def test_a_receiver_that_fails_while_closing_does_not_hinder_it(start: Start):
    gate = Gate(at_step=1)
    worker = start(lambda: make_engine(FakeRunner(before_step=gate)))
    seen: SimpleQueue[OutputEvent] = SimpleQueue()

    def fail_at_the_end(event: OutputEvent) -> None:
        seen.put(event)
        if event.finish_reason is not None:
            raise ValueError("client is gone")

    worker.submit(worker.prepare(job("bad", 50, n=2)), fail_at_the_end)
    other = Listener(worker, job("good", 50))
    assert gate.reached.wait(WAIT_S)
    worker.close(timeout_s=0.0)
    gate.opened.set()
    assert other.wait()[-1].finish_reason in ("abort", "error")
    worker.close(WAIT_S)
    assert worker.failure is None


def test_a_command_that_fails_tells_only_its_caller(start: Start):
    worker = start()
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 // 0).result(WAIT_S)
    assert Listener(worker, job("a")).wait()[-1].finish_reason == "length"
