from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.step import Step
from pagedmlx.engine.async_engine import AsyncEngine
from pagedmlx.engine.engine import Engine
from pagedmlx.engine.outputs import Job, RequestOutput
from pagedmlx.engine.worker import EngineWorker
from pagedmlx.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    PoolTooSmallError,
)
from tests.support.engines import FakeRunner, assert_idle, make_engine, run_job

pytestmark = pytest.mark.usefixtures("depth")

WAIT_S = 60.0


def slowly(_step: Step) -> None:
    # Long requests must still run when a busy machine gets round to what a test does next.
    time.sleep(0.02)


def job(prompt: str = "hello", max_tokens: int = 12, **params: Any) -> Job:
    return Job(
        prompt=prompt,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, **params),
    )


async def started(build: Callable[[], Engine] = make_engine) -> AsyncEngine:
    return await AsyncEngine.from_worker(EngineWorker(lambda _report: build()))


async def collect(engine: AsyncEngine, job: Job) -> list[RequestOutput]:
    return [output async for output in engine.generate(job)]


async def until_idle(engine: AsyncEngine) -> None:
    inner = engine._worker.engine
    async with asyncio.timeout(WAIT_S):
        # A step may still be under way when the last request has ended.
        while await asyncio.wrap_future(engine._worker.call(lambda: inner.has_unfinished)):
            await asyncio.sleep(0.001)
    await asyncio.wrap_future(engine._worker.call(lambda: assert_idle(inner)))
    assert not engine._worker._subscribers


def test_many_requests_at_once_equal_solo():
    async def main() -> None:
        async with await started() as engine:
            jobs = [job(f"prompt {i}", 1 + i % 20) for i in range(60)]
            async with asyncio.timeout(WAIT_S):
                outputs = await asyncio.gather(*(collect(engine, each) for each in jobs))
            for each, seen in zip(jobs, outputs, strict=True):
                assert "".join(o.outputs[0].delta for o in seen) == seen[-1].outputs[0].text
                assert seen[-1].outputs == replace_delta(run_job(make_engine(), each), seen[-1])
                assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
            await until_idle(engine)
            await engine.check_integrity()

    asyncio.run(main())


def replace_delta(expected: RequestOutput, seen: RequestOutput) -> tuple[Any, ...]:
    return (replace(expected.outputs[0], delta=seen.outputs[0].delta),)


def test_leaving_the_iteration_aborts_the_request():
    async def main() -> None:
        async with await started(lambda: make_engine(FakeRunner(before_step=slowly))) as engine:
            async with aclosing(engine.generate(job(max_tokens=200))) as outputs:
                async for _output in outputs:
                    break
            await until_idle(engine)
            stats = await engine.stats()
            assert stats.num_output_tokens < 200

    asyncio.run(main())


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.01])
def test_cancelling_the_task_aborts_wherever_the_request_is(delay_s: float):
    async def main() -> None:
        def build() -> Engine:
            return make_engine(FakeRunner(before_step=slowly), num_blocks=56)

        async with await started(build) as engine:
            tasks = [
                asyncio.create_task(collect(engine, job("x" * 40, 180, n=1 + i % 2)))
                for i in range(20)
            ]
            await asyncio.sleep(delay_s)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            await until_idle(engine)

    asyncio.run(main())


def test_cancelling_while_the_prompt_is_tokenized_never_submits_it():
    async def main() -> None:
        tokenizing, go_on, done = threading.Event(), threading.Event(), threading.Event()
        engine = await started()
        prepare = engine._worker.prepare

        def slow(job: Job) -> Any:
            tokenizing.set()
            assert go_on.wait(WAIT_S)
            try:
                return prepare(job)
            finally:
                done.set()

        engine._worker.prepare = slow  # type: ignore[method-assign]
        task = asyncio.create_task(collect(engine, job()))
        assert await asyncio.to_thread(tokenizing.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert await asyncio.to_thread(done.wait, WAIT_S)
        assert (await engine.stats()).num_requests == 0
        await engine.close()

    asyncio.run(main())


def test_an_iteration_that_is_forgotten_aborts_its_request():
    async def main() -> None:
        async with await started(lambda: make_engine(FakeRunner(before_step=slowly))) as engine:
            outputs = engine.generate(job(max_tokens=200))
            await anext(outputs)
            del outputs
            gc.collect()
            await asyncio.sleep(0)
            await until_idle(engine)

    asyncio.run(main())


def test_a_refused_request_raises_before_its_first_output():
    async def main() -> None:
        async with await started(lambda: make_engine(num_blocks=4)) as engine:
            with pytest.raises(InvalidRequestError, match="prompt"):
                await anext(engine.generate(job("")))
            with pytest.raises(PoolTooSmallError):
                await anext(engine.generate(job(max_tokens=30)))
            assert (await collect(engine, job(max_tokens=2)))[-1].finished

    asyncio.run(main())


def test_when_the_loop_fails_every_stream_ends_with_that_error():
    def fail(step: Step) -> None:
        slowly(step)
        if step.step_id == 5:
            raise RuntimeError("the device is gone")

    async def main() -> None:
        engine = await started(lambda: make_engine(FakeRunner(before_step=fail)))
        assert engine.is_healthy
        async with asyncio.timeout(WAIT_S):
            results = await asyncio.gather(
                *(collect(engine, job(max_tokens=100, n=1)) for _ in range(4)),
                return_exceptions=True,
            )
            assert all(isinstance(result, EngineDeadError) for result in results)
            assert not engine.is_healthy
            with pytest.raises(EngineDeadError):
                await collect(engine, job())
            with pytest.raises(EngineDeadError):
                await engine.stats()
            await engine.close()

    asyncio.run(main())


def test_closing_ends_open_streams_with_abort_and_refuses_new_ones():
    async def main() -> None:
        engine = await started(lambda: make_engine(FakeRunner(before_step=slowly)))
        stream = engine.generate(job(max_tokens=200))
        await anext(stream)
        await engine.close()
        async with asyncio.timeout(WAIT_S):
            outputs = [output async for output in stream]
        assert outputs[-1].outputs[0].finish_reason == "abort"
        await engine.close()
        with pytest.raises(EngineClosedError):
            await collect(engine, job())

    asyncio.run(main())


def test_a_load_that_fails_raises_and_leaves_no_thread():
    def fail() -> Engine:
        raise ModelLoadError("no weights")

    before = set(threading.enumerate())

    async def main() -> None:
        with pytest.raises(ModelLoadError, match="no weights"):
            await started(fail)
        with pytest.raises(ModelNotFoundError):
            await AsyncEngine.start(model="/nowhere/at/all")

    asyncio.run(main())
    new = set(threading.enumerate()) - before
    assert not [thread for thread in new if thread.name == "pagedmlx-engine" and _lingers(thread)]


def _lingers(thread: threading.Thread) -> bool:
    thread.join(WAIT_S)
    return thread.is_alive()


def test_cancelling_the_start_ends_the_loading():
    loading, go_on = threading.Event(), threading.Event()

    def build(report: Callable[[str, float | None], None]) -> Engine:
        loading.set()
        assert go_on.wait(WAIT_S)
        report("more", None)
        raise AssertionError("went on loading")

    worker = EngineWorker(build)

    async def main() -> None:
        task = asyncio.create_task(AsyncEngine.from_worker(worker))
        assert await asyncio.to_thread(loading.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(main())
    worker.close(WAIT_S)
    assert not worker._thread.is_alive()


def test_an_engine_that_is_forgotten_ends_its_thread():
    async def main() -> EngineWorker:
        engine = await started()
        return engine._worker

    worker = asyncio.run(main())
    gc.collect()
    worker._thread.join(WAIT_S)
    assert not worker._thread.is_alive()


def test_no_task_is_left_behind():
    async def main() -> None:
        async with await started() as engine:
            await collect(engine, job())
            async with aclosing(engine.generate(job())) as outputs:
                await anext(outputs)
            async with asyncio.timeout(WAIT_S):
                while asyncio.all_tasks() != {asyncio.current_task()}:
                    await asyncio.sleep(0.001)

    asyncio.run(main(), debug=True)


def test_a_submitted_job_is_taken_or_refused_before_anything_else_happens():
    async def run() -> None:
        async with await started(lambda: make_engine(num_blocks=8, max_num_waiting=1)) as engine:
            events: asyncio.Queue[Any] = asyncio.Queue()
            prepared = await engine.prepare(job(max_tokens=3))
            await engine.submit(prepared, events.put_nowait)
            while (await events.get()).finish_reason is None:
                pass
            with pytest.raises(PoolTooSmallError):
                await engine.submit(await engine.prepare(job(max_tokens=60)), events.put_nowait)

    asyncio.run(run())


def test_an_aborted_job_says_so_and_leaves_nothing():
    async def run() -> None:
        async with await started(lambda: make_engine(FakeRunner(before_step=slowly))) as engine:
            events: asyncio.Queue[Any] = asyncio.Queue()
            prepared = await engine.prepare(job(max_tokens=200, n=2))
            abort = await engine.submit(prepared, events.put_nowait)
            await events.get()
            (seen,) = await engine.progress()
            assert (seen.state, seen.num_outputs) in (("prefill", 2), ("decode", 2))
            assert seen.num_blocks > 0
            abort()
            reasons = [(await events.get()).finish_reason]
            while reasons[-2:] != ["abort", "abort"]:
                reasons.append((await events.get()).finish_reason)
            assert await engine.progress() == ()
            await until_idle(engine)

    asyncio.run(run())
