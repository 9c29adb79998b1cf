"""How many prompt tokens a step takes for the price of a few."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.engine import cheap_tokens
from pagedmlx.engine.cheap_tokens import find_cheap_tokens, measure_cheap_tokens
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import FunctionalWriter, PoolWriter
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.ops import make_backend
from tests.support.tiny_models import tiny_model
from tests.support.token_writer import TokenWriter


@given(
    fixed_s=st.floats(1e-3, 0.1),
    token_s=st.floats(1e-6, 1e-2),
    few=st.sampled_from([1, 8, 16, 64]),
    most=st.integers(1, 600),
)
def test_they_cost_hardly_more_than_few_and_twice_as_many_would(
    fixed_s: float, token_s: float, few: int, most: int
) -> None:
    def seconds(num_tokens: int) -> float:
        asked.append(num_tokens)
        return fixed_s + token_s * num_tokens

    asked: list[int] = []
    found = find_cheap_tokens(seconds, few, most)
    assert few <= found <= max(few, most)
    assert max(asked) <= max(few, most)
    assert seconds(found) <= 1.25 * seconds(few)
    assert 2 * found > most or seconds(2 * found) > 1.25 * seconds(few)


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama_window", "qwen3_5", "mamba2"])
@pytest.mark.parametrize("writer", [FunctionalWriter, TokenWriter])
def test_a_model_of_any_kind_is_measured(
    name: str, writer: type[PoolWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lengths = cheap_tokens.run_chunk, []

    def record(adapter: ModelAdapter, num_tokens: int, store: KVStore) -> None:
        lengths.append(num_tokens)
        run(adapter, num_tokens, store)

    monkeypatch.setattr(cheap_tokens, "run_chunk", record)
    monkeypatch.setattr(cheap_tokens, "_HARDLY_MORE", 1e9)
    with ModelAdapter(tiny_model(name), make_backend("auto"), block_size=4) as adapter:
        assert measure_cheap_tokens(adapter, writer(), 4, 40) == 32
        assert set(lengths) == {4, 8, 16, 32}
        assert adapter._compiled is None
        lengths.clear()
        # Nothing to choose from.
        assert measure_cheap_tokens(adapter, writer(), 4, 7) == 4
        assert not lengths


def test_without_memory_there_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("[malloc] unable to allocate")

    monkeypatch.setattr(cheap_tokens, "make_pool", refuse)
    with ModelAdapter(tiny_model("llama"), make_backend("auto"), block_size=4) as adapter:
        assert measure_cheap_tokens(adapter, FunctionalWriter(), 4, 40) == 4


@pytest.mark.parametrize(("step_s", "expected"), [(0.001, 256), (0.1, 32), (2.0, 16)])
def test_where_steps_take_long_few_are_measured(
    step_s: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def run_chunk(*_: object) -> None:
        nonlocal now
        now += step_s

    monkeypatch.setattr(cheap_tokens, "run_chunk", run_chunk)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with ModelAdapter(tiny_model("llama"), make_backend("auto"), block_size=16) as adapter:
        found = measure_cheap_tokens(adapter, FunctionalWriter(), 16, 2048)
    # However cheap more are, a long context makes them dear.
    assert found >= expected
    assert found <= 256
    assert now <= 1.0 + 6 * step_s


def test_what_is_slow_for_once_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time kernels are compiled, and later the host may be busy with something else."""
    now, runs = 0.0, dict[int, int]()

    def run_chunk(_: object, num_tokens: int, *_rest: object) -> None:
        nonlocal now
        runs[num_tokens] = number = runs.get(num_tokens, 0) + 1
        now += 1e-3 * num_tokens * {1: 100, 2: 3}.get(number, 1)

    monkeypatch.setattr(cheap_tokens, "run_chunk", run_chunk)
    monkeypatch.setattr(cheap_tokens, "_MEASURING_S", 1e9)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with ModelAdapter(tiny_model("llama"), make_backend("auto"), block_size=4) as adapter:
        assert measure_cheap_tokens(adapter, FunctionalWriter(), 4, 40) == 4
        assert runs == {4: 3, 8: 3}
