from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from pagedmlx import LLM, SamplingParams
from pagedmlx.engine import build
from pagedmlx.engine.frames import clear_frames
from pagedmlx.engine.memory import PoolPlan, plan_pool
from pagedmlx.errors import (
    InvalidRequestError,
    KernelError,
    ModelLoadError,
    PagedMLXError,
    UnsupportedModelError,
)
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import FunctionalWriter
from pagedmlx.models.deferred_rope import DeferredRopes
from pagedmlx.ops import AttentionPath, attention_paths
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from tests.metal.launcher import FiberLauncher
from tests.support.tiny_models import save_tiny_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_folder(tmp_path / "model", max_model_len=256)


def change(path: Path, **values: object) -> None:
    config = json.loads(path.read_text())
    config.update(values)
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_notes_say_how_the_engine_was_set_up(folder: Path):
    told: list[str] = []
    with LLM(str(folder), num_blocks=8, on_progress=lambda what, _share: told.append(what)) as llm:
        notes = "\n".join(llm.load_notes)
    assert "weights in float32" in notes
    assert "pool: up to 8 blocks of 16 tokens" in notes
    assert "context: 129 tokens, all that the pool holds (the model has 256)" in notes
    assert "checking the model against mlx-lm" in told
    assert "allocating the pool" in told


def test_the_context_is_the_models_unless_a_smaller_one_is_set(folder: Path):
    with LLM(str(folder), num_blocks=64) as llm:
        assert llm._worker.engine.limits.max_len == 256
    with LLM(str(folder), num_blocks=64, max_model_len=100) as llm:
        assert llm._worker.engine.limits.max_len == 100
        output = llm.generate("a" * 60, SamplingParams(max_tokens=None, ignore_eos=True))[0]
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 100
    with pytest.raises(
        InvalidRequestError, match="max_model_len: 257 is more than the model's 256"
    ):
        LLM(str(folder), num_blocks=64, max_model_len=257)


@pytest.mark.parametrize("damage", ["weights", "config", "tokenizer"])
def test_a_damaged_folder_is_one_line_with_a_hint(folder: Path, damage: str):
    name = {"weights": "model.safetensors", "config": "config.json", "tokenizer": "tokenizer.json"}
    (folder / name[damage]).unlink()
    with pytest.raises(ModelLoadError) as caught:
        LLM(str(folder), num_blocks=8)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_an_end_token_of_the_generation_config_ends_outputs(folder: Path):
    with LLM(str(folder), num_blocks=8) as llm:
        assert llm._worker.engine.tokenizer.eos_token_ids >= {1, 2}


def test_a_progress_callback_that_fails_ends_the_load_with_its_error(folder: Path):
    def fail(_what: str, _share: float | None) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        LLM(str(folder), num_blocks=8, on_progress=fail)


def test_loading_prints_and_logs_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING), LLM(str(folder), num_blocks=8) as llm:
        llm.generate("hello")
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_a_pool_that_the_device_refuses_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("[malloc] no memory")

    with monkeypatch.context() as patch:
        # The probe's small pool is made before the engine's.
        patch.setattr("pagedmlx.engine.build.plan_pool", _plan_then(patch, refuse))
        with pytest.raises(ModelLoadError, match=r"pool of \d+ bytes .* no memory") as caught:
            LLM(str(folder), num_blocks=8)
    assert caught.value.hint


def _plan_then(patch: pytest.MonkeyPatch, make_store: object) -> object:
    def plan(*args: Any, **settings: Any) -> PoolPlan:
        patch.setattr(KVStore, "__init__", make_store)
        return plan_pool(*args, **settings)

    return plan


def test_clearing_frames_reaches_the_errors_behind_an_error():
    held: list[object] = []

    class Heavy:
        def __del__(self) -> None:
            held.append("gone")

    def inner() -> None:
        heavy = Heavy()
        raise ValueError(id(heavy))

    def outer() -> None:
        try:
            inner()
        except ValueError as error:
            raise PagedMLXError("outer") from error

    with pytest.raises(PagedMLXError) as caught:
        outer()
    assert not held
    clear_frames(caught.value)
    assert held == ["gone"]


class _Wrong:
    """An attention backend whose results are off, or which can't be compiled at all."""

    name = "kernels"
    takes_padding = False

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def rest(self) -> None:
        """Nothing is kept."""

    def attend(self, queries: mx.array, *_: object) -> mx.array:
        if self.fault == "compile":
            raise RuntimeError("decode_d64: the compiler refuses it")
        return queries


@pytest.mark.parametrize("fault", ["compile", "result"])
def test_a_backend_that_fails_the_probe_is_left_for_the_next_and_said_once(
    folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch
):
    gather, *_ = attention_paths("gather")
    wrong = AttentionPath(_Wrong(fault), FunctionalWriter())
    monkeypatch.setattr(build, "attention_paths", lambda _: (wrong, gather))
    with LLM(str(folder), num_blocks=8) as llm:
        said = [note for note in llm.load_notes if note.startswith("attention: ")]
        assert len(llm.generate("abc")[0].outputs[0].token_ids) > 0
    assert "not by kernels, slower instead" in said[0]
    assert ("decode_d64" in said[0]) == (fault == "compile")
    assert said[1].startswith("attention: gather")
    monkeypatch.setattr(build, "attention_paths", lambda _: (wrong,))
    with pytest.raises(UnsupportedModelError):
        LLM(str(folder), num_blocks=8)


def test_a_model_whose_queries_cannot_be_rotated_for_it_rotates_them_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(DeferredRopes, "take", lambda *_: None)  # they have gone astray
    with LLM(str(folder), num_blocks=8, attention_backend="gather") as llm:
        said = [note for note in llm.load_notes if note.startswith("attention: ")]
        assert len(llm.generate("abc")[0].outputs[0].token_ids) > 0
    assert "not by gather, slower instead" in said[0]
    assert said[1].startswith("attention: gather")


def test_kernels_of_which_one_cannot_be_compiled_are_left_for_the_next_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(backend: KernelBackend) -> Iterator[float]:
        assert backend.kinds, "the model has been probed"
        yield 0.5
        raise KernelError("decode_d8 fails on this device", hint="do without")

    launcher = FiberLauncher()
    kernels = AttentionPath(KernelBackend(launcher, 8), InPlaceWriter(launcher))
    monkeypatch.setattr(build, "attention_paths", lambda _: (kernels, *attention_paths("gather")))
    monkeypatch.setattr(build, "compile_kernels", fail)
    with LLM(str(folder), num_blocks=8) as llm:
        said = [note for note in llm.load_notes if note.startswith("attention: ")]
        assert len(llm.generate("abc")[0].outputs[0].token_ids) > 0
    assert "not by kernels, slower instead: decode_d8 fails" in said[0]
    assert said[1].startswith("attention: gather")
    monkeypatch.setattr(build, "attention_paths", lambda _: (kernels,))
    with pytest.raises(UnsupportedModelError, match="decode_d8") as caught:
        LLM(str(folder), num_blocks=8)
    assert caught.value.hint == "do without"


def test_kernels_are_refused_where_there_is_no_gpu(folder: Path):
    if mx.default_device() == mx.Device(mx.gpu):
        assert attention_paths("kernels")[0].backend.name == "kernels"
        return
    with pytest.raises(InvalidRequestError, match="attention_backend: kernels need a GPU"):
        LLM(str(folder), num_blocks=8, attention_backend="kernels")
