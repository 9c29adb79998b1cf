"""From where on a cascade is taken follows from what was measured."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.errors import KernelError
from pagedmlx.ops import tuning
from pagedmlx.ops.base import AttentionParams
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Kernel, Launch, Platform
from pagedmlx.ops.prefill import prefill_variant
from pagedmlx.ops.tuning import MIN_GAIN, SHAPES, compile_kernels, measure_threshold, tune
from pagedmlx.ops.variants import DecodeVariant
from tests.metal.launcher import FiberLauncher, RecordingLauncher
from tests.support.attention import make_case

SPANS = ((40, 1), (9, 1))


@pytest.fixture
def launcher() -> FiberLauncher:
    """Executes kernels on the CPU."""
    return FiberLauncher()


@pytest.fixture
def backend(launcher: FiberLauncher) -> KernelBackend:
    """A backend that has attended in a layer with a window and in one without."""
    backend = KernelBackend(launcher)
    case = make_case(SPANS, writer=InPlaceWriter(launcher), k_head_dim=64, v_head_dim=64)
    for window in (None, 20):
        case.attend(backend, AttentionParams(scale=0.125, window=window))
    return backend


def gains(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    found = iter(values)
    monkeypatch.setattr(tuning, "_gain", lambda *_: next(found))


def test_shapes_spare_ever_fewer_tokens() -> None:
    spared = [shared * (count - 1) for count, shared in SHAPES]
    assert spared == sorted(spared, reverse=True)
    assert len(set(spared)) == len(spared)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ((MIN_GAIN - 0.1,), None),
        ((4.0, MIN_GAIN, MIN_GAIN - 0.1), 15 * 4096),
        ((4.0,) * len(SHAPES), 3 * 1024),
    ],
)
def test_the_threshold_is_the_least_that_gained_enough(
    backend: KernelBackend,
    measured: tuple[float, ...],
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gains(monkeypatch, *measured)
    (kind,) = backend.kinds
    assert measure_threshold(backend.launcher, backend.wave, kind) == expected
    gains(monkeypatch, *measured)
    (note,) = tune(backend, 64, 4096)
    thresholds = backend._planner.cascades.thresholds
    assert thresholds.get(prefill_variant(kind)) == expected
    assert ("for each" in note) is (expected is None)


@pytest.mark.parametrize("kind", [KernelError, RuntimeError])
def test_a_kernel_that_does_not_compile_or_run_leaves_it_off(
    kind: type[Exception], backend: KernelBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise kind("merge doesn't compile")

    monkeypatch.setattr(tuning, "_gain", fail)
    assert backend._chooser.may_split
    (note,) = tune(backend, 64, 4096)
    assert "merge doesn't compile" in note
    assert not backend._planner.cascades.thresholds
    assert not backend._chooser.may_split


@pytest.mark.parametrize("planted", ["", "is_wrong"])
def test_a_way_that_gives_something_else_is_not_taken(
    planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(kernel: Kernel, source: str) -> str:
        is_shared = "partials" in kernel.output_names and "_prefill_" in kernel.name
        if not planted or not is_shared:
            return source
        assert "const int start = work[5];" in source
        return source.replace("const int start = work[5];", "const int start = work[5] + 8;")

    launcher = FiberLauncher(change=change)
    backend = KernelBackend(launcher)
    case = make_case(SPANS, writer=InPlaceWriter(launcher), k_head_dim=64, v_head_dim=64)
    case.attend(backend, AttentionParams(scale=0.125))
    gains(monkeypatch, 2.0, 1.0)
    (note,) = tune(backend, 64, 4096)
    assert ("differ by" in note) is bool(planted)
    assert backend._chooser.may_split is not bool(planted)


@pytest.mark.parametrize("sinks", [False, True])
def test_both_ways_are_really_timed(launcher: FiberLauncher, sinks: bool) -> None:
    backend = KernelBackend(launcher)
    case = make_case(SPANS, writer=InPlaceWriter(launcher), k_head_dim=64, v_head_dim=64)
    heads = case.queries.shape[1]
    given = mx.array(np.zeros(heads, np.float32)) if sinks else None
    case.attend(backend, AttentionParams(scale=0.125, sinks=given))
    (kind,) = backend.kinds
    assert isinstance(kind, DecodeVariant)
    counted: list[str] = []

    class Counting:
        platform = launcher.platform
        view = staticmethod(launcher.view)

        def __call__(self, launch: Launch) -> list[mx.array]:
            counted.append(launch.kernel.name)
            return launcher(launch)

    assert tuning._gain(Counting(), 64, kind, 3, 32) > 0
    kernels = {name.split("_")[1] for name in counted}
    assert {"decode", "prefill", "merge"} <= kernels


@pytest.mark.parametrize("platform", Platform)
@pytest.mark.parametrize("has_halves", [False, True])
def test_chunks_of_long_prompts_find_a_plan_where_one_is_needed(
    platform: Platform, has_halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = FiberLauncher()
    launcher.platform = platform
    monkeypatch.setattr(tuning, "PLANNED_TOKENS", 80)
    monkeypatch.setattr(tuning, "MIN_CHUNK", 16 if has_halves else 32)
    gains(monkeypatch, 0.0)
    backend = KernelBackend(launcher)
    case = make_case(
        SPANS, writer=InPlaceWriter(launcher), k_head_dim=64, v_head_dim=64, dtype="float16"
    )
    case.attend(backend, AttentionParams(scale=0.125))
    tune(backend, 32, 4096)
    (kind,) = backend.kinds
    variant = backend._planner.prefill_variant(kind)
    found = {
        (rows, tokens): backend._chooser.choose(variant, rows, tokens, False)
        for rows, tokens in ((32, 32), (32, 64), (32, 96), (16, 64))
    }
    gathered = [shape for shape, path in found.items() if path == "gather"]
    planned = [(32, 32), (32, 64), *([(16, 64)] if has_halves else [])]
    assert gathered == (planned if platform is Platform.CUDA else [])
    # One more compares the ways to attend; the first chunk is gathered as well.
    num_gathers = sum(n for name, n in launcher.executed.items() if "_gather_" in name)
    assert num_gathers == (3 + 5 * has_halves if platform is Platform.CUDA else 0)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dtype", "factor"), [("float32", 2), ("bfloat16", 8)])
def test_all_that_decoding_takes_was_compiled_at_load_and_no_more(
    dtype: str, factor: int, deterministic: bool, rotates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = RecordingLauncher(platform=Platform.CUDA)
    backend = KernelBackend(launcher, 8, deterministic=deterministic)
    rng = np.random.default_rng(0)

    def attend(max_rows: int, *, shared: bool = False) -> None:
        counts = sorted(rng.integers(1, max_rows + 1, rng.integers(2, 5)).tolist())
        spans = [(int(rng.choice([70, 90, 300, 2000])), count) for count in counts]
        case = make_case(
            spans,
            k_head_dim=64,
            v_head_dim=64,
            factor=factor,
            dtype=dtype,
            writer=InPlaceWriter(launcher),
        )
        group = case.batch.groups[0]
        if shared:
            case.batch.host.groups[0].block_tables[:, :4] = np.arange(4)
        for window in (None, 20):
            rows = mx.zeros((len(case.queries), 2, 64), case.queries.dtype)
            case.store.write(0, rows, rows, group.slot_mapping)
            if rotates:
                case.store.commit()  # then they are in the pool already
            case.attend(backend, AttentionParams(scale=0.125, window=window))

    attend(1)
    shares = list(compile_kernels(backend))
    assert shares == sorted(shares)
    assert shares[-1] == 1
    compiled = set(launcher.sources)
    writers = [
        each for each in launcher.sources.values() if {"queries", "keys"} <= {*each.input_names}
    ]
    assert bool(writers) is not rotates
    for num_rows in (1,) * 10 + (8,) * 10:
        attend(num_rows)
    assert not launcher.sources.keys() - compiled
    # The recorder's zeros can't be compared, and need not be timed.
    monkeypatch.setattr(tuning, "_compare_prefills", lambda *_: None)
    gains(monkeypatch, *(2.0 for _ in SHAPES))
    tune(backend, 64, 4096)
    (kind,) = backend.kinds
    backend.set_cascade_threshold(kind, 1)
    compiled = set(launcher.sources)
    launcher.sources.clear()
    for _ in range(10):
        attend(1, shared=True)
    assert launcher.sources.keys() <= compiled
    attends_shared = any("_prefill_" in kernel.name for kernel in launcher.sources.values())
    assert attends_shared is not deterministic
