"""The pool takes memory as its blocks come into use, and gives back what nobody has used lately."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import pytest

from pagedmlx import LLM, SamplingParams
from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.core.kv_manager import KVManager
from pagedmlx.engine import memory
from pagedmlx.engine.engine import Engine
from pagedmlx.engine.outputs import Job
from pagedmlx.engine.runner import ModelRunner
from pagedmlx.engine.worker import EngineWorker
from pagedmlx.kv import resize, store
from pagedmlx.kv.layout import KVLayout, LayerShape
from pagedmlx.sampling.sampler import Sampler
from tests.support.engines import FakeRunner, make_engine, run_jobs
from tests.support.tiny_models import save_tiny_folder

IDLE_S = 60.0
SLAB = 8


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, runner: FakeRunner, **settings: object) -> Engine:
    engine = make_engine(runner, clock=clock, **{"idle_release_s": IDLE_S, **settings})
    kv: KVManager = engine._scheduler.kv
    kv._slab_blocks = SLAB
    return engine


def use(engine: Engine, num_jobs: int) -> None:
    """Jobs that hold seven blocks of four tokens each, all at once."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    run_jobs(engine, [Job(prompt=f"{n:020}", sampling_params=params) for n in range(num_jobs)])


def test_what_was_needed_lately_stays_and_the_rest_goes_in_whole_slabs() -> None:
    clock, runner = Clock(), FakeRunner()
    engine = make(clock, runner)
    use(engine, 8)
    used = engine.stats().peak_used_blocks
    assert used > 3 * SLAB
    assert engine.release_due_in_s() == IDLE_S
    clock.now += IDLE_S - 1
    engine.release_unused()
    assert runner.shrunk == []
    clock.now += 1
    engine.release_unused()
    # All of it was in use within that time.
    assert runner.shrunk.pop() == (engine._scheduler.kv.pools[0].num_created_blocks,)
    use(engine, 2)
    clock.now += IDLE_S
    engine.release_unused()
    # Those that run reuse what is free or cached, wherever it lies: its end stays with them.
    (kept,) = runner.shrunk.pop()
    clock.now += IDLE_S
    engine.release_unused()
    assert runner.shrunk.pop() == (SLAB,) <= (kept,)
    assert engine.release_due_in_s() is None
    engine.check_integrity()
    use(engine, 8)


def test_blocks_in_use_stay_however_long_they_are_held() -> None:
    clock, runner = Clock(), FakeRunner()
    engine = make(clock, runner)
    engine.add_request(Job(prompt="x" * 200, sampling_params=SamplingParams(max_tokens=50)))
    for _ in range(40):
        engine.step()
        clock.now += IDLE_S
        engine.release_unused()
        engine.check_integrity()
    assert engine.stats().num_used_blocks > 50
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("settings", [{"idle_release_s": 0}, {"num_blocks": SLAB}])
def test_nothing_is_given_back_where_nothing_can_or_shall_be(settings: dict[str, object]) -> None:
    clock = Clock()
    engine = make(clock, FakeRunner(), **settings)
    use(engine, 1)
    clock.now += 10 * IDLE_S
    assert engine.release_due_in_s() is None


PROMPTS_THAT_COME_TOGETHER = [pytest.param([20] * 8, id="many"), pytest.param([200], id="long")]


@pytest.mark.usefixtures("depth")
@pytest.mark.parametrize("lengths", PROMPTS_THAT_COME_TOGETHER)
def test_the_pool_grows_once_for_prompts_that_take_many_steps(lengths: list[int]) -> None:
    runner = FakeRunner()
    runner.room = (SLAB,)
    engine = make(Clock(), runner, max_num_batched_tokens=16)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [str(n) * length for n, length in enumerate(lengths)]
    run_jobs(engine, [Job(prompt=prompt, sampling_params=params) for prompt in prompts])
    assert engine.stats().num_steps > 10
    assert engine._scheduler.kv.num_created_blocks > (4 * SLAB,)
    assert runner.num_growths == 1


@pytest.mark.usefixtures("depth")
def test_what_the_pool_has_grown_for_is_not_given_back_before_it_is_used() -> None:
    clock, runner = Clock(), FakeRunner()
    runner.room = (SLAB,)
    engine = make(clock, runner, max_num_batched_tokens=16)
    for length, max_tokens in ((40, 1), (60, 4), (60, 4)):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(Job(prompt=f"{length:0{length}}", sampling_params=params))
    engine.add_request(Job(prompt="x" * 60, sampling_params=SamplingParams(max_tokens=4)))
    while engine.has_unfinished:
        clock.now += IDLE_S
        engine.release_unused()
        engine.step()
    assert len(runner.shrunk) > 1
    assert runner.num_growths == 1
    clock.now += IDLE_S
    engine.release_unused()
    clock.now += IDLE_S
    engine.release_unused()
    assert runner.room == (SLAB,)


@pytest.mark.parametrize("ends_first", [False, True])
def test_what_the_pool_has_grown_for_is_given_back_when_it_was_aborted(ends_first: bool) -> None:
    clock, runner = Clock(), FakeRunner()
    runner.room = (SLAB,)
    engine = make(clock, runner, max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    stream = engine.add_request(Job(prompt="a" * 40, sampling_params=params))
    others = [
        engine.add_request(Job(prompt=f"{n}" * 60, sampling_params=SamplingParams(max_tokens=1)))
        for n in range(3)
    ]
    while not runner.num_growths:
        engine.step()
    kv = engine._scheduler.kv
    if ends_first:
        # What it held goes back while the others, none of which has begun, keep the arrays long.
        engine.abort(stream)
        for _ in range(2):
            clock.now += IDLE_S
            engine.release_unused()
        assert kv.num_created_blocks == (SLAB,)
    assert runner.room > (4 * SLAB,)
    for other in others:
        engine.abort(other)
    assert not kv.can_give_back
    clock.now += IDLE_S
    engine.release_unused()
    if ends_first:
        assert runner.room == (SLAB,)
        assert engine.release_due_in_s() is None
    else:
        # It may come to need another block for its token, and one to grow into.
        assert runner.room <= (kv.num_created_blocks[0] + 2,)


def refuse_arrays_longer_than(most: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have no memory for them; gives the lengths that were refused, as that happens."""
    refused: list[int] = []
    unlimited = resize.with_length

    def with_length(array: mx.array, length: int, fill: float) -> mx.array:
        if length > most:
            if length not in refused[-1:]:  # one by one after several at once
                refused.append(length)
            raise RuntimeError("[malloc] no memory")
        return unlimited(array, length, fill)

    monkeypatch.setattr(resize, "with_length", with_length)
    return refused


@pytest.mark.parametrize(
    ("most", "tried", "length"),
    [(32, [28], 28), (27, [28, 8], 8), (7, [28, 8, 6], 6), (5, [28, 8, 6], 4)],
)
def test_a_pool_grows_by_less_where_there_is_no_memory_for_what_is_ahead(
    most: int, tried: list[int], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = (LayerShape(1, 2, 2),)
    layout = KVLayout(4, "float32", layers, (KVGroup(KVGroupKind.FULL, (0,)),))
    pool = store.KVStore(layout, (32,), slab_blocks=2)
    pool.fit(0, 4)
    runner = ModelRunner(Mock(), pool, Sampler())
    lengths = refuse_arrays_longer_than(most, monkeypatch)
    if length < 6:
        with pytest.raises(RuntimeError):
            runner.grow((5,), (27,))
    else:
        runner.grow((5,), (27,))
    assert lengths == [each for each in tried if each > most]
    assert pool.num_blocks == [length]
    assert runner.has_room((length,))
    assert not runner.has_room((length + 1,))
    # To give back more than there is changes nothing.
    assert not runner.has_spare((32,))
    runner.shrink((32,))
    assert pool.num_blocks == [length]
    assert not runner.has_spare((length - 1,))
    assert runner.has_spare((length - 2,))


def test_an_idle_engine_gives_back_by_itself() -> None:
    runner = FakeRunner()
    clock = time.monotonic

    def build(_: object) -> Engine:
        engine = make_engine(runner, clock=clock, idle_release_s=0.05)
        engine._scheduler.kv._slab_blocks = SLAB
        use(engine, 8)
        return engine

    worker = EngineWorker(build)
    worker.start().result(60)
    try:
        deadline = time.monotonic() + 60
        while (SLAB,) not in runner.shrunk and time.monotonic() < deadline:
            time.sleep(0.01)
        assert runner.shrunk[-1] == (SLAB,)
    finally:
        worker.close()


@pytest.mark.parametrize(("kind", "most"), [("llama", 320), ("llama", 140), ("llama_window", 320)])
def test_a_model_answers_the_same_while_its_pool_grows_and_shrinks(
    kind: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the device has no memory for so much as a growing pool would take at once."""
    folder = save_tiny_folder(tmp_path, kind)
    prompts = [[6 + (n * 7 + i) % 200 for i in range(10 + 5 * n)] for n in range(16)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    settings = {"num_blocks": 320, "block_size": 8, "pool_fill": float("nan")}
    with LLM(str(folder), **settings) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
        whole = llm.stats().allocated_bytes
        assert whole == llm.stats().pool_bytes
    monkeypatch.setattr(memory, "MIN_SLAB_BYTES", 0)
    refused = refuse_arrays_longer_than(most, monkeypatch)
    with LLM(str(folder), **settings, idle_release_s=1000.0) as llm:
        sizes = [llm.stats().allocated_bytes]
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            assert [each.outputs[0].token_ids for each in outputs] == expected
            sizes.append(llm.stats().allocated_bytes)
            for _ in range(2):
                release_now(llm)
            sizes.append(llm.stats().allocated_bytes)
        assert sizes[0] == sizes[2] == sizes[4] == whole // 16
        # How far it grows depends on how many have come by then.
        assert all(sizes[0] < size < whole for size in (sizes[1], sizes[3]))
    assert bool(refused) is (most < 320)


@pytest.mark.parametrize("kind", ["llama", "llama_window"])
@pytest.mark.parametrize("lengths", [[70] * 6, [300]])
def test_a_model_s_pool_grows_once_for_prompts_that_come_together(
    kind: str, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_folder(tmp_path, kind)
    monkeypatch.setattr(memory, "MIN_SLAB_BYTES", 0)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    jobs = [
        Job(prompt_token_ids=[6 + (n * 7 + i) % 200 for i in range(x)], sampling_params=params)
        for n, x in enumerate(lengths)
    ]
    fit, groups = store.KVStore.fit, list[int]()

    def noted(pool: store.KVStore, group: int, num_blocks: int) -> None:
        groups.append(group)
        fit(pool, group, num_blocks)

    monkeypatch.setattr(store.KVStore, "fit", noted)
    with LLM(str(folder), num_blocks=128, block_size=8, max_num_batched_tokens=64) as llm:
        engine = llm._worker.engine
        # On its own thread, so that no step runs before all have come.
        llm._worker.call(lambda: run_jobs(engine, jobs)).result(60)
        assert llm.stats().num_steps > 5
        assert llm.stats().peak_used_blocks > 4 * SLAB
        assert groups == list(range(len(engine._scheduler.kv.pools)))


def release_now(llm: LLM) -> None:
    def release() -> None:
        engine = llm._worker.engine
        engine._last_release_s = -1e9
        engine.release_unused()

    llm._worker.call(release).result(60)
