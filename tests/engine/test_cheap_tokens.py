"""How many prompt tokens a step takes for the price of a few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.engine import cheap_tokens
from pagedmlx.engine.cheap_tokens import find_cheap_tokens, measure_cheap_tokens
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

    def record(adapter: ModelAdapter, num_rows: int, *rest: object) -> None:
        lengths.append(num_rows)
        run(adapter, num_rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cheap_tokens, "run_chunk", record)
    monkeypatch.setattr(cheap_tokens, "_HARDLY_MORE", 1e9)
    with ModelAdapter(tiny_model(name), make_backend("auto"), block_size=4) as adapter:
        assert measure_cheap_tokens(adapter, writer(), 4, 40) == 32
        assert set(lengths) == {4, 8, 16, 32}
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
