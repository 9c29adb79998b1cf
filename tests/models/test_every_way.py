"""Whole runs of models that don't go through as token rows; llama stands for those that do."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from pagedmlx.engine import build
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.dummy_steps import make_pool, run_chunk
from pagedmlx.ops import make_backend
from pagedmlx.ops.gather import GatherBackend
from pagedmlx.ops.paths import AttentionPath
from tests.support.greedy import Runs, run_every_way
from tests.support.tiny_models import HYBRID, VOCAB_SIZE, tiny_model
from tests.support.token_writer import TokenWriter


def on_a_thread(work: Callable[[], Runs]) -> Runs:
    """Run where an engine can be closed: afterwards the thread is done with MLX."""
    results: list[Runs | BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3_text", "gemma2", "deepseek_v3", "gemma3n", "qwen3_5", "mamba2", "afm7"],
)
def test_tokens_are_mlx_lms_whatever_happens_on_the_way(name: str, depth: int) -> None:
    runs = on_a_thread(lambda: run_every_way(tiny_model(name), VOCAB_SIZE, depth))
    assert runs.equal == {"batch": True, "again": True, "alone": True, "forks": True}
    assert runs.num_preemptions > 0
    is_hybrid = name in HYBRID
    assert (runs.num_cached_tokens > 0) is not is_hybrid
    assert any(note.startswith("prefix cache: off") for note in runs.notes) is is_hybrid
    assert any(note.startswith("states: at most") for note in runs.notes) is is_hybrid


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "falcon_h1", "rwkv7"])
def test_steps_that_are_not_waited_for_give_the_same_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = AttentionPath(GatherBackend(), TokenWriter())
    monkeypatch.setattr(build, "attention_paths", lambda name: (path,))
    runs = on_a_thread(lambda: run_every_way(tiny_model(name), VOCAB_SIZE, depth=1))
    assert runs.equal == {"batch": True, "again": True, "alone": True, "forks": True}


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_5", "mamba2"])
def test_the_largest_chunk_is_tried(name: str) -> None:
    with ModelAdapter(tiny_model(name), make_backend("auto"), block_size=4) as adapter:
        run_chunk(adapter, 30, make_pool(adapter, 30))
