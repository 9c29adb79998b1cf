"""Decode steps of the whole model, with and without a cascade, are timed as they are served."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from pagedmlx.config import EngineConfig
from pagedmlx.engine import build, cascade_gain
from pagedmlx.engine.cascade_gain import _NUM_OWN, measure_cascade_gain, shapes_to_try
from pagedmlx.engine.inputs import EngineLimits
from pagedmlx.engine.memory import PoolPlan
from pagedmlx.kv.store import KVStore
from pagedmlx.models import compiled
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.dummy_steps import DummySequence, Tokens
from pagedmlx.models.parts import RowLayout
from pagedmlx.ops.cascade import CascadePath
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Launch
from pagedmlx.ops.paths import AttentionPath
from pagedmlx.progress import ignore_progress
from tests.metal.launcher import FiberLauncher
from tests.support import tiny_models
from tests.support.tiny_models import CONFIGS, tiny_model
from tests.support.tokenizers import byte_tokenizer

COUNT, SHARED = 3, 32


class Noting(FiberLauncher):
    """Executes kernels, and notes which there are in each way."""

    def __init__(self) -> None:
        super().__init__()
        self.backend: KernelBackend | None = None
        self.kernels: dict[CascadePath, set[str]] = {}

    def __call__(self, launch: Launch) -> list[mx.array]:
        if self.backend is not None:
            self.kernels.setdefault(self.backend.cascades.path, set()).add(
                launch.kernel.name.split("_")[1]
            )
        return super().__call__(launch)


@pytest.fixture
def launcher() -> Noting:
    return Noting()


@pytest.fixture
def adapter(launcher: Noting, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelAdapter]:
    """A model whose heads the kernels for prompts take, too."""
    config = {**CONFIGS["llama"], "head_dim": 16, "num_hidden_layers": 2}
    monkeypatch.setattr(tiny_models, "CONFIGS", {**CONFIGS, "tiny": config})
    launcher.backend = KernelBackend(launcher, 64)
    with ModelAdapter(tiny_model("tiny"), launcher.backend, block_size=8) as adapter:
        yield adapter


def test_both_ways_are_really_taken(
    adapter: ModelAdapter, launcher: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade_gain, "_ROUND_S", 0.0)
    monkeypatch.setattr(compiled, "MIN_USES", 1000)  # nothing can be executed in a trace
    before = mx.get_active_memory()
    assert measure_cascade_gain(adapter, InPlaceWriter(launcher), COUNT, SHARED) > 0
    assert launcher.kernels[CascadePath.OFF] <= {"write", "decode", "merge", "rope"}
    assert launcher.kernels[CascadePath.ON] >= {"decode", "prefill", "merge"}
    assert launcher.backend is not None
    assert launcher.backend.cascades.path is CascadePath.AUTO
    mx.synchronize()
    assert mx.get_active_memory() - before < 10_000


@pytest.mark.parametrize("step_s", [0.008, 1.0])
def test_the_gain_is_of_whole_steps_once_all_is_compiled(
    step_s: float, adapter: ModelAdapter, launcher: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, starts, used = 0.0, [], set[CascadePath]()

    def run_step(
        adapter: ModelAdapter, _: KVStore, parts: Iterable[tuple[DummySequence, Tokens]]
    ) -> None:
        nonlocal now
        parts = list(parts)
        assert len(parts) == COUNT
        backend: Any = adapter.backend
        path = backend.cascades.path
        now += step_s * (2.5 if path is CascadePath.OFF else 1.0)
        if path not in used:  # kernels are compiled
            now += 100.0
            used.add(path)
        starts.append(parts[0][0].start)
        for sequence, _tokens in parts:
            sequence.start += 1
            # The table holds what the steps add.
            assert sequence.start <= 8 * len(sequence.table) == SHARED + _NUM_OWN

    monkeypatch.setattr(cascade_gain, "run_step", run_step)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    gain = measure_cascade_gain(adapter, InPlaceWriter(launcher), COUNT, SHARED)
    assert gain == pytest.approx(2.5)
    # Steps that take long are few.
    assert len(starts) == (6 if step_s == 1.0 else 2 * (2 + compiled.MIN_USES + 3 * 12))


def test_what_fails_leaves_the_path_as_it_was(
    adapter: ModelAdapter, launcher: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(cascade_gain, "run_step", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        measure_cascade_gain(adapter, InPlaceWriter(launcher), COUNT, SHARED)
    assert launcher.backend is not None
    assert launcher.backend.cascades.path is CascadePath.AUTO


FITTING = (8192 + 16 * _NUM_OWN) // 16
BLOCK_BYTES = 100


def made_plan(num_blocks: int, max_num_seqs: int = 16, state_bytes: int = 0) -> PoolPlan:
    """Of a model with a window too, for whose layers there are fewer blocks."""
    pool_bytes = num_blocks * BLOCK_BYTES
    blocks = (2 * num_blocks, num_blocks // 2)
    capacity = 2 * num_blocks * 16
    return PoolPlan(blocks, blocks, 1, BLOCK_BYTES, pool_bytes, capacity, max_num_seqs, state_bytes)


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "max_model_len", "expected"),
    [
        (FITTING, 16, 8192 + _NUM_OWN, True),
        (FITTING - 1, 16, 32_768, False),
        (FITTING, 15, 32_768, False),
        (FITTING, 16, 8192 + _NUM_OWN - 1, False),
    ],
)
def test_only_what_may_come_is_tried(
    num_blocks: int, max_num_seqs: int, max_model_len: int, expected: bool, adapter: ModelAdapter
) -> None:
    limits = EngineLimits(max_model_len, 99_999, 16, 100)
    shapes = shapes_to_try(adapter, made_plan(num_blocks, max_num_seqs), limits)
    assert ((16, 8192) in shapes) is expected


@pytest.mark.parametrize("state_bytes", [0, 1])
@pytest.mark.parametrize("layout", RowLayout)
def test_no_sequence_is_tried_that_no_cascade_can_serve(
    state_bytes: int, layout: RowLayout, adapter: ModelAdapter
) -> None:
    """A state is there at a sequence's own end only, and can't be made up."""
    limits = EngineLimits(99_999, 99_999, 16, 100)
    adapter.row_layout = layout
    shapes = shapes_to_try(adapter, made_plan(9999, state_bytes=state_bytes), limits)
    assert bool(shapes) is (layout is RowLayout.TOKEN_ROWS and not state_bytes)


@pytest.mark.parametrize("name", ["tiny", "qwen3_5", "mamba2"])
def test_what_is_measured_is_what_the_engine_goes_by(
    name: str, adapter: ModelAdapter, launcher: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[int, int]] = []

    def gain(_adapter: ModelAdapter, _writer: object, count: int, num_shared: int) -> float:
        tried.append((count, num_shared))
        return 2.0

    def cheap(_adapter: ModelAdapter, _writer: object, few: int, most: int) -> int:
        assert (few, most) == (8, 48)
        return 32

    launcher.backend = backend = KernelBackend(launcher, 64)
    path = AttentionPath(backend, InPlaceWriter(launcher))
    monkeypatch.setattr(build, "attention_paths", lambda *_: (path,))
    monkeypatch.setattr(build, "measure_cascade_gain", gain)
    monkeypatch.setattr(build, "measure_cheap_tokens", cheap)
    monkeypatch.setattr(cascade_gain, "SHAPES", ((64, 256), (4, 256), (4, 128)))
    loaded = tiny_model(name)
    monkeypatch.setattr(build, "serve_made_up_requests", lambda *_: None)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    config = EngineConfig(
        block_size=8,
        num_blocks=128,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        prefill_chunk_size=48,
        max_stream_gap_ms=250,
        max_model_len=400,
    )
    engine = build.build_engine(loaded, byte_tokenizer(), config, on_progress=ignore_progress)
    monkeypatch.undo()
    try:
        assert engine._scheduler.max_prompt_tokens == 32
        assert tried == ([(4, 256), (4, 128)] if name == "tiny" else [])
        thresholds = backend.cascades.thresholds.values()
        assert [*thresholds] == ([3 * 128] if name == "tiny" else [])
        assert any("spares 384 tokens" in note for note in engine.notes) is (name == "tiny")
    finally:
        runner: Any = engine._runner
        runner._adapter.close()
        runner._on_close()
