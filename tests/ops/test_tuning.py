"""From where on a cascade is taken follows from what was measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.errors import KernelError
from pagedmlx.ops import tuning
from pagedmlx.ops.base import AttentionParams
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Kernel, Platform
from pagedmlx.ops.prefill import prefill_variant
from pagedmlx.ops.tuning import MIN_GAIN, SHAPES, compile_kernels, find_threshold, tune
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


def gains(*values: float) -> Callable[[int, int], float]:
    """Of ``SHAPES``."""
    return lambda *shape: values[SHAPES.index(shape)]


def test_shapes_spare_ever_fewer_tokens() -> None:
    spared = [shared * (count - 1) for count, shared in SHAPES]
    assert spared == sorted(spared, reverse=True)
    assert len(set(spared)) == len(spared)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ((MIN_GAIN - 0.1,) * len(SHAPES), None),
        ((4.0, MIN_GAIN, *(MIN_GAIN - 0.1,) * (len(SHAPES) - 2)), 15 * 4096),
        ((4.0,) * len(SHAPES), 3 * 1024),
    ],
)
def test_the_threshold_is_the_least_that_gained_enough(
    backend: KernelBackend,
    measured: tuple[float, ...],
    expected: int | None,
) -> None:
    (kind,) = backend.kinds
    assert find_threshold(SHAPES, gains(*measured)) == expected
    (note,) = tune(backend, 64, 4096, SHAPES, gains(*measured))
    thresholds = backend.cascades.thresholds
    assert thresholds.get(prefill_variant(kind)) == expected
    assert ("for each" in note) is (expected is None)


def test_what_was_found_holds_for_every_kind_of_layer(launcher: FiberLauncher) -> None:
    backend = KernelBackend(launcher)
    case = make_case(SPANS, writer=InPlaceWriter(launcher), k_head_dim=64, v_head_dim=64)
    for scale in (0.125, 0.25):
        case.attend(backend, AttentionParams(scale=scale))
    assert len(backend.kinds) == 2
    (note,) = tune(backend, 64, 4096, SHAPES[:1], gains(2.0))
    assert "122880 tokens" in note
    assert backend.cascades.thresholds == {
        backend._planner.prefill_variant(kind): 15 * 8192 for kind in backend.kinds
    }
    assert len(backend.cascades.thresholds) == 2


def test_measuring_ends_when_it_has_taken_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def gain(*_: int) -> float:
        nonlocal now
        now += 2.0
        return 5.0

    monkeypatch.setattr(time, "monotonic", lambda: now)
    # Two take longer than there is time; what they found holds.
    assert find_threshold(SHAPES, gain) == SHAPES[1][1] * (SHAPES[1][0] - 1)
    assert now == 4.0


@pytest.mark.parametrize("kind", [KernelError, RuntimeError])
@pytest.mark.parametrize("fails", ["_compare_prefills", "gain"])
def test_what_does_not_compile_or_run_leaves_it_off(
    fails: str, kind: type[Exception], backend: KernelBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise kind("no memory")

    if fails != "gain":
        monkeypatch.setattr(tuning, fails, fail)
    assert backend._chooser.may_split
    (note,) = tune(backend, 64, 4096, SHAPES, fail)
    assert "no memory" in note
    assert not backend.cascades.thresholds
    # Kernels that were tried and are right stay in use.
    assert backend._chooser.may_split is (fails == "gain")


@pytest.mark.parametrize("planted", ["", "is_wrong"])
def test_a_way_that_gives_something_else_is_not_taken(planted: str) -> None:
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
    notes = tune(backend, 64, 4096, [], gains())
    assert ["differ by" in note for note in notes] == [True] * bool(planted)
    assert backend._chooser.may_split is not bool(planted)


@pytest.mark.parametrize("platform", Platform)
@pytest.mark.parametrize("has_halves", [False, True])
def test_chunks_of_long_prompts_find_a_plan_where_one_is_needed(
    platform: Platform, has_halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = FiberLauncher()
    launcher.platform = platform
    monkeypatch.setattr(tuning, "PLANNED_TOKENS", 80)
    monkeypatch.setattr(tuning, "MIN_CHUNK", 16 if has_halves else 32)
    backend = KernelBackend(launcher)
    case = make_case(
        SPANS, writer=InPlaceWriter(launcher), k_head_dim=64, v_head_dim=64, dtype="float16"
    )
    case.attend(backend, AttentionParams(scale=0.125))
    tune(backend, 32, 4096, [], gains())
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
    # The recorder's zeros can't be compared.
    monkeypatch.setattr(tuning, "_compare_prefills", lambda *_: None)
    tune(backend, 64, 4096, [], gains())
    (kind,) = backend.kinds
    backend.set_cascade_threshold(kind, 1)
    compiled = set(launcher.sources)
    launcher.sources.clear()
    for _ in range(10):
        attend(1, shared=True)
    assert launcher.sources.keys() <= compiled
    attends_shared = any("_prefill_" in kernel.name for kernel in launcher.sources.values())
    assert attends_shared is not deterministic
