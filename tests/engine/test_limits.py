"""What MLX is told of memory, and what it is told when an engine is gone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from pagedmlx.config import EngineConfig
from pagedmlx.engine import memory
from pagedmlx.engine.limits import MemoryLimits
from pagedmlx.engine.memory import memory_limit

GIB = 1 << 30


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
