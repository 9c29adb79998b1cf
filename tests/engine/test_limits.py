"""What MLX is told of memory, and what it is told when an engine is gone."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import pytest

from pagedmlx.config import EngineConfig
from pagedmlx.engine import build, memory
from pagedmlx.engine.limits import MemoryLimits
from pagedmlx.engine.memory import memory_limit
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.ops import make_backend
from pagedmlx.progress import ignore_progress
from tests.support.tiny_models import tiny_model
from tests.support.token_writer import TokenWriter
from tests.support.tokenizers import byte_tokenizer

GIB = 1 << 30
CHUNK_BYTES = 1 << 20


@pytest.fixture
def own() -> int:
    """MLX's own limit."""
    own = mx.set_memory_limit(GIB)
    mx.set_memory_limit(own)
    return own


def current() -> int:
    found = mx.set_memory_limit(GIB)
    mx.set_memory_limit(found)
    return found


def test_a_limit_holds_until_it_is_undone(own: int) -> None:
    limits = MemoryLimits(7 * GIB)
    assert current() == 7 * GIB
    limits.undo()
    assert current() == own
    mx.set_memory_limit(5 * GIB)
    limits.undo()  # the second time it has no word any more
    assert current() == 5 * GIB
    mx.set_memory_limit(own)


def test_of_several_the_newest_has_the_word_whichever_ends_first(own: int) -> None:
    for first in (0, 1):
        engines = [MemoryLimits(7 * GIB), MemoryLimits(9 * GIB)]
        assert current() == 9 * GIB
        engines.pop(first).undo()
        assert current() == (7, 9)[1 - first] * GIB
        MemoryLimits(2 * GIB).undo()
        assert current() == (7, 9)[1 - first] * GIB
        engines.pop().undo()
        assert current() == own


def test_one_without_a_limit_has_the_word_too(own: int) -> None:
    first, second = MemoryLimits(7 * GIB), MemoryLimits(None)
    assert current() == own
    assert MemoryLimits.leaves(100 * GIB)
    third = MemoryLimits(8 * GIB)
    assert current() == 8 * GIB
    third.undo()
    assert current() == own
    second.undo()
    assert current() == 7 * GIB
    first.undo()
    assert current() == own


def test_limits_may_be_asked_for_while_engines_come_and_go(own: int) -> None:
    ends = threading.Event()

    def come_and_go() -> None:
        while not ends.is_set():
            MemoryLimits(3 * GIB).undo()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    held, thread = MemoryLimits(7 * GIB), threading.Thread(target=come_and_go)
    try:
        thread.start()
        assert all(MemoryLimits.leaves(0) for _ in range(50_000))
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(before)
        held.undo()
    assert current() == own


def test_no_limit_leaves_mlxs_own(own: int) -> None:
    limits = MemoryLimits(None)
    assert current() == own
    limits.undo()
    assert current() == own


def test_on_metal_what_is_used_stays_wired(monkeypatch: pytest.MonkeyPatch) -> None:
    wired = [123]

    def set_wired_limit(limit: int) -> int:
        wired.append(limit)
        return wired[-2]

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 9 * GIB})
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    limits = MemoryLimits(None)
    assert wired == [123, 9 * GIB]
    limits.undo()
    assert wired == [123, 9 * GIB, 123]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"gpu_memory_utilization": 0.5}, 2 * GIB + 5 * GIB),
        ({"num_blocks": 5}, None),
        ({"kv_cache_memory": GIB}, None),
    ],
)
def test_the_limit_is_the_share_and_what_others_use(
    settings: dict[str, Any], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(memory, "device_memory_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 3 * GIB)
    assert memory_limit(EngineConfig(**settings), GIB) == expected


def test_on_the_cpu_there_is_none() -> None:
    assert memory_limit(EngineConfig(), GIB) is None


def test_what_can_be_allocated_is_up_to_the_newest_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "get_active_memory", lambda: 3 * GIB)
    assert MemoryLimits.leaves(100 * GIB)
    first = MemoryLimits(4 * GIB)
    assert MemoryLimits.leaves(GIB)
    assert not MemoryLimits.leaves(GIB + 1)
    second = MemoryLimits(6 * GIB)
    assert MemoryLimits.leaves(3 * GIB)
    second.undo()
    assert not MemoryLimits.leaves(GIB + 1)
    first.undo()
    assert MemoryLimits.leaves(100 * GIB)


@pytest.mark.parametrize(("spare", "is_short"), [(0, False), (-1, True)])
def test_an_engine_waits_for_the_device_where_the_next_layers_would_not_fit(
    spare: int, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    active, needed = 3 * GIB, GIB
    headroom = build.RUNNING_AHEAD * needed
    limit = active + needed + headroom // build.OVERSHOOT + spare
    monkeypatch.setattr(build, "memory_limit", lambda *_: limit)
    monkeypatch.setattr(build, "fit_step_to_device", lambda config, *_: (config, headroom))
    engine = build.build_engine(
        tiny_model(), byte_tokenizer(), EngineConfig(), on_progress=ignore_progress
    )
    runner: Any = engine._runner  # to close it would take this thread's streams along
    try:
        monkeypatch.setattr(mx, "get_active_memory", lambda: active)
        assert runner._adapter.hand_over.memory_is_short() is is_short
    finally:
        runner._adapter.close()
        runner._on_close()


@pytest.mark.parametrize("fails", [False, True])
def test_while_a_chunk_is_measured_memory_is_short(
    fails: bool, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def run_chunk(adapter: ModelAdapter, num_rows: int, _: object) -> None:
        seen.extend((adapter.hand_over.memory_is_short(), current()))
        assert num_rows == 64
        if fails:
            raise MemoryError
        mx.eval(mx.zeros(CHUNK_BYTES // 4))

    monkeypatch.setattr(memory, "run_chunk", run_chunk)
    monkeypatch.setattr(memory, "make_pool", lambda *_: None)
    monkeypatch.setattr(memory, "device_memory_bytes", lambda: 10 * GIB)
    config = EngineConfig(prefill_chunk_size=64, max_num_batched_tokens=64)
    with ModelAdapter(tiny_model(), make_backend("auto")) as adapter:
        rests: list[int] = []
        monkeypatch.setattr(adapter, "rest", lambda: rests.append(mx.get_active_memory()))
        before = adapter.hand_over.memory_is_short
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        with pytest.raises(MemoryError) if fails else nullcontext():
            _, headroom = memory.fit_step_to_device(config, adapter, TokenWriter(), 0)
            assert headroom - memory.RUNNING_AHEAD * CHUNK_BYTES in range(100)
        monkeypatch.undo()
        assert adapter.hand_over.memory_is_short is before
    assert seen == [True, *rests]
    assert current() == own
