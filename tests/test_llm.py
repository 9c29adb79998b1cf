from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedmlx.llm
from pagedmlx import LLM, EngineConfig, SamplingParams
from pagedmlx.core.step import Step
from pagedmlx.engine.engine import Engine
from pagedmlx.engine.outputs import Job, RequestOutput
from pagedmlx.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    PoolTooSmallError,
    QueueFullError,
)
from tests.support.engines import FakeRunner, assert_idle, make_engine, run_job
from tests.support.tiny_models import save_tiny_folder
from tests.support.tokenizers import byte_ids

REPOSITORY = Path(__file__).parents[1]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
WAIT_S = 120.0
FakeLLM = Callable[..., LLM]
Python = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLLM]:
    made: list[LLM] = []

    def make(runner: FakeRunner | None = None, **settings: Any) -> LLM:
        def build(_config: EngineConfig, _report: object) -> Engine:
            return make_engine(runner, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(pagedmlx.llm, "load_engine", build)
            made.append(LLM("fake"))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def jobs(count: int, max_tokens: int = 12) -> Iterator[Job]:
    for number in range(count):
        params = replace(GREEDY, max_tokens=1 + number % max_tokens)
        yield Job(prompt=f"prompt {number}", request_id=str(number), sampling_params=params)


def assert_llm_idle(llm: LLM) -> None:
    engine = llm._worker.engine
    llm._worker.call(lambda: assert_idle(engine)).result(WAIT_S)
    assert not llm._worker._subscribers


# generate and chat.


def test_outputs_come_in_the_order_of_the_prompts(fake: FakeLLM):
    prompts = [f"prompt {number}" for number in range(20)]
    params = [replace(GREEDY, max_tokens=20 - number) for number in range(20)]
    outputs = fake().generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    for output, prompt, each in zip(outputs, prompts, params, strict=True):
        solo = run_job(make_engine(), Job(prompt=prompt, sampling_params=each))
        assert output.outputs == solo.outputs
        assert output.finished


def test_one_prompt_may_be_text_or_tokens(fake: FakeLLM):
    llm = fake()
    ids = byte_ids(b"hello")
    arrays = [np.array(ids), np.array([ids], np.int32), [np.array(ids)]]
    forms: list[Any] = ["hello", ["hello"], ids, [ids], iter(["hello"]), *arrays]
    outputs = [llm.generate(form, GREEDY) for form in forms]
    assert {len(output) for output in outputs} == {1}
    assert len({output[0].outputs[0].text for output in outputs}) == 1
    assert llm.generate([]) == []


@pytest.mark.parametrize("prompts", [5, None, b"x", {"a": 1}, 1.5])
def test_what_is_no_prompt_is_refused_by_name(fake: FakeLLM, prompts: Any):
    llm = fake()
    with pytest.raises(InvalidRequestError, match="is not text, token ids or a list of them"):
        llm.generate(prompts)
    with pytest.raises(InvalidRequestError, match=r"^prompt"):
        list(llm.stream(prompts))


def test_a_model_may_be_a_path(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        LLM(tmp_path / "none")


def test_one_conversation_or_many(fake: FakeLLM):
    llm = fake()
    hello = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(hello, GREEDY)
    first, second = llm.chat([hello, [{"role": "user", "content": "bye"}]], GREEDY)
    assert one.outputs == first.outputs != second.outputs


def test_more_prompts_than_may_be_in_flight_all_come_back(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pagedmlx.llm, "_MAX_IN_FLIGHT", 3)
    outputs = fake().generate([f"prompt {number}" for number in range(11)], GREEDY)
    assert [output.prompt for output in outputs] == [f"prompt {n}" for n in range(11)]


def test_a_prompt_that_cannot_be_served_keeps_all_from_running(fake: FakeLLM):
    runner = FakeRunner()
    llm = fake(runner)
    with pytest.raises(InvalidRequestError, match="prompt: is empty"):
        llm.generate(["fine", "", "fine"], GREEDY)
    assert llm.stats().num_requests == 0
    with pytest.raises(PoolTooSmallError):
        llm.generate(["fine", "x"], replace(GREEDY, max_tokens=300))
    with pytest.raises(InvalidRequestError, match="2 entries for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY])
    assert_llm_idle(llm)


def test_calls_from_many_threads_are_served_together(fake: FakeLLM):
    llm = fake()
    prompts = [f"prompt {number}" for number in range(12)]
    with ThreadPoolExecutor(6) as threads:
        outputs = list(threads.map(lambda prompt: llm.generate(prompt, GREEDY)[0], prompts))
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.outputs == run_job(make_engine(), Job(prompt, sampling_params=GREEDY)).outputs
    assert_llm_idle(llm)


def test_settings_or_a_config_but_not_both():
    with pytest.raises(InvalidRequestError, match="config"):
        LLM("smollm2", config=EngineConfig())
    with pytest.raises(InvalidRequestError, match="block_size"):
        LLM("smollm2", block_size=5)


# stream.


def test_streamed_deltas_join_to_the_text(fake: FakeLLM):
    llm = fake()
    seen = list(llm.stream("hello", GREEDY))
    assert "".join(output.outputs[0].delta for output in seen) == seen[-1].outputs[0].text
    assert seen[-1].outputs[0].text == llm.generate("hello", GREEDY)[0].outputs[0].text
    chat = list(llm.stream([{"role": "user", "content": "hello"}], GREEDY))
    assert chat[-1].finished
    tokens = list(llm.stream(byte_ids(b"hello"), GREEDY))
    assert tokens[-1].outputs[0].text == seen[-1].outputs[0].text


def test_leaving_a_stream_aborts_it(fake: FakeLLM):
    llm = fake(FakeRunner(before_step=lambda _step: time.sleep(0.02)))
    stream = llm.stream("hello", replace(GREEDY, max_tokens=200, n=2))
    next(stream)
    stream.close()
    for output in llm.stream("hello", replace(GREEDY, max_tokens=200)):
        if len(output.outputs[0].token_ids) == 3:
            break
    del output
    gc.collect()
    assert llm.stats().num_running == 0
    assert_llm_idle(llm)


# generate_iter.


def test_results_come_as_they_end_with_their_ids(fake: FakeLLM):
    outputs = list(fake().generate_iter(jobs(50), max_in_flight=7))
    assert sorted(int(output.request_id) for output in outputs) == list(range(50))
    assert all(output.finished and output.error is None for output in outputs)


@pytest.mark.parametrize("max_in_flight", [1, 4])
def test_jobs_are_pulled_only_as_there_is_room(fake: FakeLLM, max_in_flight: int):
    num_pulled = 0

    def endless() -> Iterator[Job]:
        nonlocal num_pulled
        for job in jobs(10**9):
            num_pulled += 1
            yield job

    llm = fake()
    results = llm.generate_iter(endless(), max_in_flight=max_in_flight)
    assert num_pulled == 0
    for num_taken, _ in zip(range(30), results, strict=False):
        assert num_pulled - num_taken <= max_in_flight
    results.close()  # type: ignore[attr-defined]
    assert_llm_idle(llm)


def test_a_finished_result_does_not_wait_for_a_slow_source(fake: FakeLLM):
    llm = fake()
    results: dict[str, RequestOutput] = {}

    def source() -> Iterator[Job]:
        yield from jobs(1)
        _wait_for(lambda: llm.stats().num_finished_requests == 1)
        yield Job(prompt="second", request_id="second", sampling_params=GREEDY)
        assert results, "the first result was held back"
        yield Job(prompt="third", request_id="third", sampling_params=GREEDY)

    for result in llm.generate_iter(source()):
        results[result.request_id] = result
    assert list(results) == ["0", "second", "third"]


def test_refused_jobs_are_told_and_the_others_go_on(fake: FakeLLM):
    def mixed() -> Iterator[Job]:
        yield Job(prompt="", request_id="empty")
        yield Job(prompt="a", request_id="a", sampling_params=GREEDY)
        yield Job(prompt="b", request_id="big", sampling_params=replace(GREEDY, max_tokens=300))
        yield Job(prompt="a", request_id="a", sampling_params=GREEDY)
        # Until here the first of that name is still under way.
        go_on.set()
        yield Job(prompt="c", request_id="c", sampling_params=GREEDY)

    go_on = threading.Event()
    llm = fake(FakeRunner(before_step=lambda _step: go_on.wait(WAIT_S)))
    outputs = list(llm.generate_iter(mixed()))
    errors = {o.request_id: type(o.error) for o in outputs if o.error is not None}
    assert errors == {
        "empty": InvalidRequestError,
        "big": PoolTooSmallError,
        "a": InvalidRequestError,
    }
    done = {o.request_id: o.outputs for o in outputs if o.error is None}
    assert done.keys() == {"a", "c"}
    assert_llm_idle(llm)


def test_a_full_queue_only_makes_jobs_wait(fake: FakeLLM):
    llm = fake(max_num_waiting=2, max_num_seqs=3)
    outputs = list(llm.generate_iter(jobs(60), max_in_flight=20))
    assert all(output.error is None for output in outputs)
    assert sorted(int(output.request_id) for output in outputs) == list(range(60))
    assert len(llm.generate(["x"] * 30, GREEDY)) == 30


def test_a_queue_that_others_fill_is_told_when_nothing_of_ours_runs(fake: FakeLLM):
    gate = threading.Event()
    llm = fake(
        FakeRunner(before_step=lambda _step: gate.wait(WAIT_S)), max_num_waiting=1, max_num_seqs=1
    )
    first, second = llm.stream("first", GREEDY), llm.stream("second", GREEDY)
    commands = llm._worker._commands
    with ThreadPoolExecutor(3) as threads:
        others = [threads.submit(list, first)]
        _wait_for(lambda: bool(llm._worker.engine._scheduler.running))
        others.append(threads.submit(list, second))
        _wait_for(lambda: commands.qsize() == 1)
        late = threads.submit(lambda: list(llm.generate_iter(jobs(3))))
        _wait_for(lambda: commands.qsize() == 4)
        gate.set()
        assert all(other.result(WAIT_S)[-1].finished for other in others)
        outputs = late.result(WAIT_S)
    assert len(outputs) == 3
    assert isinstance(outputs[0].error, QueueFullError)
    assert_llm_idle(llm)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_no_room_at_all_is_refused(fake: FakeLLM):
    with pytest.raises(InvalidRequestError, match="max_in_flight: 0"):
        fake().generate_iter(jobs(1), max_in_flight=0)


# Failure and end.


def test_a_dead_loop_ends_every_call(fake: FakeLLM):
    def fail(step: Step) -> None:
        if step.step_id == 9:
            raise RuntimeError("the device is gone")

    llm = fake(FakeRunner(before_step=fail))
    with pytest.raises(EngineDeadError, match="the device is gone"):
        llm.generate(["a", "b"], replace(GREEDY, n=3, temperature=1.0))
    with pytest.raises(EngineDeadError):
        list(llm.generate_iter(jobs(2)))
    with pytest.raises(EngineDeadError):
        next(llm.stream("a"))
    llm.close()


def test_a_dead_loop_raises_its_own_error_in_every_thread(fake: FakeLLM):
    def fail(_step: Step) -> None:
        raise RuntimeError("the device is gone")

    llm = fake(FakeRunner(before_step=fail))
    errors: list[EngineDeadError] = []
    for _ in range(3):
        with pytest.raises(EngineDeadError) as caught:
            llm.generate("a")
        errors.append(caught.value)
    assert len(set(map(id, errors))) == 3
    assert all(isinstance(error.__cause__, RuntimeError) for error in errors)


def test_a_closed_llm_refuses_and_closes_again(fake: FakeLLM):
    llm = fake()
    with llm:
        llm.generate("a", GREEDY)
    llm.close()
    for call in (lambda: llm.generate("a"), llm.stats, llm.check_integrity):
        with pytest.raises(EngineClosedError):
            call()


def test_closing_from_another_thread_ends_a_running_call(fake: FakeLLM):
    runner = FakeRunner(before_step=lambda _step: time.sleep(0.02))
    llm = fake(runner)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(llm.generate, "a", replace(GREEDY, max_tokens=200))
        _wait_for(lambda: bool(runner.scheduled))
        llm.close()
        (output,) = call.result(WAIT_S)
    assert output.outputs[0].finish_reason == "abort"


def test_a_load_that_fails_leaves_no_thread():
    before = set(threading.enumerate())
    with pytest.raises(ModelNotFoundError):
        LLM("/nowhere/at/all")
    _wait_for(lambda: set(threading.enumerate()) <= before)


# Real threads, streams and processes.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def python() -> Iterator[Python]:
    with ExitStack() as processes:

        def start(code: str, *arguments: object) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        yield start


SETUP = """
import signal, sys, threading, time
from pagedmlx import LLM, SamplingParams
# A shell's background jobs, and all that they start, ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
def load():
    return LLM(sys.argv[1], num_blocks=32)
def tell_when_busy(llm):
    def watch():
        while not llm.stats().num_running:
            time.sleep(0.01)
        print('busy', flush=True)
    threading.Thread(target=watch, daemon=True).start()
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "llm = load(); print(len(llm.generate('a')))\n"
            "stream = load().stream('a'); next(stream); print('open')",
            "1\nopen\n",
        ),
        (
            "from pathlib import Path\nPath(sys.argv[1], 'model.safetensors').write_bytes(b'x')\n"
            "for model in ('/nowhere/at/all', sys.argv[1]):\n"
            "    try:\n        LLM(model)\n"
            "    except Exception as error:\n        print(type(error).__name__)",
            "ModelNotFoundError\nModelLoadError\n",
        ),
        (
            "import asyncio\nfrom pagedmlx import AsyncEngine\n"
            "async def main():\n"
            "    global engine\n"
            "    engine = await AsyncEngine.start(model=sys.argv[1], num_blocks=32)\n"
            "asyncio.run(main()); print('never closed')",
            "never closed\n",
        ),
    ],
    ids=["one idle and one with a stream", "no model and a broken one", "async"],
)
def test_a_process_that_never_closes_exits_cleanly(
    python: Python, tmp_path: Path, code: str, expected: str
):
    process = python(SETUP + code, save_tiny_folder(tmp_path / "model"))
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (0, expected, "")


def test_a_forked_process_is_refused_and_its_parent_goes_on(python: Python, folder: Path):
    code = SETUP + (
        "import os, warnings\n"
        "from pagedmlx.errors import EngineClosedError\n"
        "warnings.simplefilter('ignore')\n"
        "llm = load()\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        llm.generate('a')\n"
        "    except EngineClosedError as error:\n"
        "        print(error, flush=True)\n"
        "        os._exit(0)\n"
        "os.wait()\n"
        "print(len(llm.generate('a')))\n"
    )
    out, err = python(code, folder).communicate(timeout=WAIT_S)
    assert (out, err) == ("the engine's thread is not in this process\n1\n", "")


def test_ctrl_c_ends_a_call_and_the_process(python: Python, folder: Path):
    code = SETUP + (
        "llm = load()\n"
        "params = SamplingParams(max_tokens=400, ignore_eos=True)\n"
        "try:\n"
        "    tell_when_busy(llm)\n"
        "    while True: llm.generate(['a'] * 8, params)\n"
        "except KeyboardInterrupt:\n"
        "    llm.check_integrity()\n"
        "    assert llm.stats().num_running == 0\n"
        "    llm.close()\n"
        "    print('interrupted')\n"
    )
    process = python(code, folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (0, "interrupted\n", "")


def test_ctrl_c_that_nobody_catches_ends_the_process(python: Python, folder: Path):
    code = SETUP + (
        "llm = load()\ntell_when_busy(llm)\n"
        "while True: llm.generate(['a'] * 8, SamplingParams(max_tokens=400, ignore_eos=True))\n"
    )
    process = python(code, folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_two_models_run_one_after_the_other_and_at_the_same_time(folder: Path, tmp_path: Path):
    other = save_tiny_folder(tmp_path / "other", seed=1)

    def texts(llm: LLM) -> list[str]:
        return [o.outputs[0].text for o in llm.generate(["one", "two"], GREEDY)]

    alone: list[list[str]] = []
    for path in (folder, other):
        with LLM(str(path), num_blocks=32) as llm:
            alone.append(texts(llm))
    assert alone[0] != alone[1]
    first, second = (LLM(str(path), num_blocks=32) for path in (folder, other))
    with second:
        with first, ThreadPoolExecutor(2) as threads:
            assert list(threads.map(texts, (first, second))) == alone
        assert texts(second) == alone[1]


def test_an_llm_made_in_one_thread_serves_others(folder: Path):
    with ThreadPoolExecutor(1) as threads:
        llm = threads.submit(LLM, str(folder), num_blocks=32).result(60)
    with llm:
        here = llm.generate("hello", GREEDY)[0].outputs
        with ThreadPoolExecutor(2) as threads:
            there = [threads.submit(llm.generate, "hello", GREEDY) for _ in range(2)]
            assert [call.result(60)[0].outputs for call in there] == [here, here]
