"""The requests that are served before the real ones."""

from __future__ import annotations

import mlx.core as mx
import pytest

from pagedmlx.config import EngineConfig
from pagedmlx.core.step import Step
from pagedmlx.engine.runner import ModelRunner
from pagedmlx.engine.warm_up import serve_made_up_requests
from pagedmlx.kv.writer import FunctionalWriter, PoolWriter
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.ops import make_backend
from pagedmlx.sampling.sampler import Sampler
from tests.support.tiny_models import tiny_model
from tests.support.token_writer import TokenWriter


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    seen: list[Step] = []
    dispatch = ModelRunner.dispatch

    def record(self: ModelRunner, step: Step) -> None:
        seen.append(step)
        dispatch(self, step)

    monkeypatch.setattr(ModelRunner, "dispatch", record)
    return seen


def serve(name: str, writer: PoolWriter, max_len: int = 4096, **settings: int) -> None:
    config = EngineConfig(**{"block_size": 4, **settings})  # type: ignore[arg-type]
    with ModelAdapter(tiny_model(name), make_backend("auto"), block_size=4) as adapter:
        serve_made_up_requests(adapter, writer, config, max_len, Sampler())


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama_window", "qwen3_5", "mamba2"])
@pytest.mark.parametrize("writer", [FunctionalWriter, TokenWriter])
def test_every_kind_of_step_has_run(name: str, writer: type[PoolWriter], steps: list[Step]) -> None:
    serve(name, writer())
    kinds = {(step.num_prompt_tokens > 0, len(step.scheduled)) for step in steps}
    # A prompt alone, a prompt beside an answer, one answer, and three at a time.
    assert {(True, 1), (True, 2), (False, 1), (False, 3)} <= kinds
    sampled = {entry.sequence.request.params.temperature for s in steps for entry in s.scheduled}
    assert len(sampled) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"prefill_chunk_size": 1, "max_num_batched_tokens": 1},
        {"max_stream_gap_ms": 1},
        {"max_len": 30},
    ],
)
def test_it_ends_under_any_settings(settings: dict[str, int], steps: list[Step]) -> None:
    serve("llama", FunctionalWriter(), **settings)
    assert steps


def test_a_model_that_takes_hardly_any_tokens_is_left_alone(steps: list[Step]) -> None:
    serve("llama", FunctionalWriter(), max_len=12)
    assert not steps


def test_nothing_is_kept() -> None:
    with ModelAdapter(tiny_model("llama"), make_backend("auto"), block_size=4) as adapter:

        def run() -> None:
            config = EngineConfig(block_size=4)
            serve_made_up_requests(adapter, TokenWriter(), config, 4096, Sampler())

        run()
        mx.synchronize()
        before = mx.get_active_memory()
        run()
        mx.synchronize()
        assert mx.get_active_memory() <= before
