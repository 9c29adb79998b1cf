"""The prefill kernel: every variant strictly checked, a covering set executed, faults caught."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.kv.layout import AxisOrder
from pagedmlx.ops.base import AttentionParams
from pagedmlx.ops.in_place import InPlaceWriter, pool_shape
from pagedmlx.ops.kernels import DEFAULT_WAVE, KernelBackend
from pagedmlx.ops.launch import Kernel, Launcher
from pagedmlx.ops.prefill import PrefillVariant, attend_prefill, plan_prefill
from pagedmlx.ops.variants import BLOCK_SIZES
from tests.metal.cases import covering
from tests.metal.check import check
from tests.metal.execute import ExecutionError
from tests.metal.launcher import FiberLauncher, RecordingLauncher
from tests.support.attention import TOLERANCES, Case, make_case, to_numpy
from tests.support.batches import slots_of

# Of the tolerance that the GPU is given: sums here are as exact as float32 is.
MAX_DEVIATION = 0.25


@dataclass(frozen=True)
class Setting:
    """Everything that a launch of the kernel depends on."""

    dtype: str
    head_dims: tuple[int, int]
    factor: int
    block_size: int
    num_kv_heads: int
    order: AxisOrder
    window: int | None
    softcap: float | None
    sinks: bool
    spans: tuple[tuple[int, int], ...]
    columns: int = 1
    split: bool = False

    def __str__(self) -> str:
        values = (getattr(self, field.name) for field in fields(self) if field.name != "spans")
        return "-".join(v.name if isinstance(v, AxisOrder) else str(v) for v in values)

    def make_case(self, launcher: Launcher, seed: int = 0) -> Case:
        """A pool that holds NaN in every slot that no row sees."""
        case = make_case(
            self.spans,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            factor=self.factor,
            k_head_dim=self.head_dims[0],
            v_head_dim=self.head_dims[1],
            dtype=self.dtype,
            order=self.order,
            seed=seed,
            writer=InPlaceWriter(launcher),
        )
        for sequence, (start, _) in enumerate(self.spans):
            passed = max(start - self.window + 1, 0) if self.window else 0
            if passed:
                slots = slots_of(case.batch.host, 0, sequence, self.block_size)[:passed]
                nan = [
                    mx.full((passed, self.num_kv_heads, dim), np.nan, getattr(mx, self.dtype))
                    for dim in self.head_dims
                ]
                case.store.write(0, *nan, mx.array(slots))
        case.store.commit()
        return case

    def params(self) -> AttentionParams:
        heads = self.num_kv_heads * self.factor
        sinks = mx.array(np.linspace(-2.0, 3.0, heads, dtype=np.float32)) if self.sinks else None
        return AttentionParams(self.head_dims[0] ** -0.5, self.window, sinks, self.softcap)

    def variant(self, case: Case) -> PrefillVariant:
        shape = pool_shape(case.store.bind(0)[0])
        scale = self.params().scale
        settings = (self.sinks, scale, self.softcap, False, self.columns)
        return PrefillVariant(shape, self.dtype, self.factor, *settings)

    def run(self, launcher: Launcher, case: Case) -> np.ndarray:
        # Chunks of the fewest tokens.
        wave, path = (1 << 20, "split") if self.split else (DEFAULT_WAVE, "kernel")
        backend = KernelBackend(launcher, wave, prefill=path, columns=self.columns)
        return case.attend(backend, self.params())

    def deviation(self, launcher: Launcher) -> float:
        """Largest error against float64, in units of the type's tolerance; infinite for NaN."""
        case = self.make_case(launcher)
        output, expected = self.run(launcher, case), case.expected(self.params())
        error = np.abs(output - expected) / (TOLERANCES[self.dtype] * (1 + np.abs(expected)))
        return float(np.where(np.isnan(error), np.inf, error).max())


FIRST: Mapping[str, Sequence[Any]] = {
    "dtype": tuple(TOLERANCES),
    "head_dims": (*((dim, dim) for dim in (64, 80, 96, 128, 192, 256)), (192, 128)),
    "factor": (1, 2, 3, 5, 8, 16),
}
SECOND: Mapping[str, Sequence[Any]] = {
    "block_size": BLOCK_SIZES,
    "num_kv_heads": (1, 2),
    "order": tuple(AxisOrder),
    "window": (None, 5, 40),
    "softcap": (None, 20.0),
    "sinks": (False, True),
    "columns": (1, 2),
    "split": (False, True),  # where no window hides anything
    # Rows and contexts around the borders of blocks, of tiles and of the launch's pieces.
    "spans": (
        ((0, 9), (0, 15), (0, 16), (0, 17)),
        ((0, 31), (1, 32), (14, 33)),
        ((47, 16), (49, 15), (33, 31)),
        ((0, 63), (0, 9)),
        ((0, 65), (54, 9)),
        ((17, 64),),
        ((120, 41), (200, 9)),
    ),
}


def every_setting() -> list[Setting]:
    """All values of the first axes with each other; the second axes take turns."""
    rng = random.Random(0)
    return [
        Setting(
            **dict(zip(FIRST, values, strict=True)),
            **{name: rng.choice(axis) for name, axis in SECOND.items()},
        )
        for values in itertools.product(*FIRST.values())
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "executed" in metafunc.fixturenames:
        full = metafunc.config.getoption("--metal-full")
        settings = (
            every_setting() if full else [Setting(**axes) for axes in covering({**FIRST, **SECOND})]
        )
        metafunc.parametrize("executed", settings, ids=str)


@pytest.mark.parametrize("head_dims", FIRST["head_dims"], ids=str)
def test_every_variant_passes_the_strict_check(head_dims, count: Counter[str]):
    recorder = RecordingLauncher()
    settings = [setting for setting in every_setting() if setting.head_dims == head_dims]
    for setting in settings:
        setting.run(recorder, setting.make_case(recorder))
    sources = {text: kernel for text, kernel in recorder.sources.items() if is_prefill(kernel)}
    assert sources
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(check, sources))
    for report, kernel in zip(reports, sources.values(), strict=True):
        assert not report.diagnostics, kernel.name
        assert report.threadgroup_bytes == kernel.threadgroup_bytes, kernel.name
    count["variants of prefill checked"] += len(settings)
    count["distinct sources of prefill checked"] += len(reports)


def test_executed_variant_gives_the_answer(executed: Setting, count: Counter[str]):
    launcher = FiberLauncher()
    assert executed.deviation(launcher) < MAX_DEVIATION
    assert any("prefill" in name for name in launcher.executed)
    count["variants of prefill executed"] += 1


SMALL = Setting(
    dtype="float16",
    head_dims=(64, 64),
    factor=2,
    block_size=16,
    num_kv_heads=1,
    order=AxisOrder.HEAD_MAJOR,
    window=None,
    softcap=None,
    sinks=False,
    spans=((0, 41), (30, 10)),
)


@pytest.mark.parametrize(
    "setting",
    [
        SMALL,
        replace(SMALL, split=True),
        replace(SMALL, window=7),
        replace(SMALL, spans=((0, 100),)),
        replace(SMALL, spans=((70, 60),), block_size=64, split=True),
    ],
    ids=str,
)
def test_tiles_that_are_loaded_ahead_as_on_cuda_change_no_bit(setting: Setting):
    now, ahead = "#define LOADS_AHEAD 0", "#define LOADS_AHEAD 1"

    def change(kernel: Kernel, source: str) -> str:
        assert (now in source) is is_prefill(kernel)
        # That many loads at once, so that all of a tile's are.
        return source.replace(now, ahead).replace("COPIES_AT_ONCE 4", "COPIES_AT_ONCE 16")

    launchers = FiberLauncher(), FiberLauncher(change=change)
    outputs = [setting.run(launcher, setting.make_case(launcher)) for launcher in launchers]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("seed", range(3))
def test_order_of_threads_changes_no_bit(seed):
    outputs = [
        SMALL.run(launcher, SMALL.make_case(launcher))
        for launcher in (FiberLauncher(), FiberLauncher(seed=1000 * (seed + 1)))
    ]
    np.testing.assert_array_equal(*outputs)


def test_prefill_beside_decode_comes_back_in_its_own_rows():
    launcher = FiberLauncher()
    setting = replace(SMALL, dtype="float32", spans=((40, 1), (3, 1), (16, 20), (7, 3), (0, 9)))
    assert setting.deviation(launcher) < MAX_DEVIATION
    assert {name.split("_")[1] for name in launcher.executed} == {"write", "decode", "prefill"}


@pytest.mark.parametrize("window", [None, 40])
def test_several_launches_give_the_same_bits_as_one(window):
    launcher = FiberLauncher()
    setting = replace(SMALL, window=window, spans=((20, 70), (0, 33), (3, 9)))
    case = setting.make_case(launcher)
    outputs = []
    for max_work in (1, 1 << 19, 1 << 40):
        launches = plan_prefill(
            case.batch.host, [0, 1, 2], 0, window, setting.variant(case), max_work
        )
        row, parts = 0, []
        for launch in launches:
            rows = case.queries[row : row + launch.num_rows]
            parts.append(attend_prefill(launcher, rows, 0, case.store, launch, setting.params()))
            row += launch.num_rows
        outputs.append((len(launches), to_numpy(mx.concatenate(parts))))
    (many, first), (some, second), (one, third) = outputs
    assert many == 6
    assert one == 1
    assert one < some < many
    np.testing.assert_array_equal(first, third)
    np.testing.assert_array_equal(second, third)


@pytest.mark.parametrize("window", [None, 11])
def test_where_a_prompt_is_cut_changes_no_bit(window):
    launcher = FiberLauncher()
    setting = replace(SMALL, window=window, spans=((0, 50),))
    case = setting.make_case(launcher)
    whole = setting.run(launcher, case)
    cut = replace(setting, spans=((37, 13),)).make_case(launcher)
    keys, values = (mx.array(a[0]).astype(mx.float16) for a in (case.keys, case.values))
    cut.store.write(0, keys, values, mx.array(slots_of(cut.batch.host, 0, 0, setting.block_size)))
    tail = setting.run(launcher, replace(cut, queries=case.queries[37:]))
    np.testing.assert_array_equal(tail, whole[37:])


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
SEEN = "if (uint((base) + KEY(j) - start) >= uint(high_end - start)) continue;"
WRONG, RACE, STRICT = ("result",), ("race", "uninitialised"), ("strict check",)

# What is planted, as what stands there and what comes instead, and who must see it.
FAULTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "causal mask off by one": ("position >= my_end[c][e]", "position > my_end[c][e]", WRONG),
    "dropped causal mask": ("|| position >= my_end[c][e]", "", WRONG),
    "dropped window": ("position < my_end[c][e] - window ||", "", WRONG),
    "masks too few tiles": ("base + KEYS > low_end", "base > low_end", WRONG),
    "wrong block": ("i * BS : KEY(i)", "i * BS / 2 : KEY(i)", WRONG),
    "block of the other half": ("blocks[REGULAR ? j * APART / BS : j]", "blocks[0]", WRONG),
    "wrong head": ("kv_head * BS + my_key", "my_key", WRONG),
    "wrong slot": ("(j) * APART % BS", "(j) * APART % BS / 2", WRONG),
    "beyond the table": ("table[min(", "table[1000 + min(", ("out_of_bounds",)),
    "dead slots read": (SEEN, "", WRONG),
    "freed blocks read": (SEEN, "if ((base) + KEY(j) >= high_end) continue;", WRONG),
    "missing barrier before the tile": (f"if (BUFFERS == 1 && first == 0) {BARRIER}", "", RACE),
    "missing barrier after the tile": (f"{BARRIER}simdgroup_matrix", "simdgroup_matrix", RACE),
    "barrier too small": (f"{BARRIER}s", f"{BARRIER}s".replace("thread", "simd", 1), RACE),
    "vectors beside each other mixed up": ("COLUMN_BIT_1 4", "COLUMN_BIT_1 8", WRONG),
    "dropped rescale": ("acc[c][i].thread_elements()[e] *= shrink;", ";", WRONG),
    "wrong lanes of V": ("matrix_column(lane) + e) * row_loads", "e) * row_loads", WRONG),
    "wrong loads of K": (
        "mine[matrix_column(lane) + e]",
        "mine[(matrix_column(lane) ^ 4) + e]",
        WRONG,
    ),
    "wrong place of an element": ("return row * W + w;", "return row * W + (w ^ 1);", WRONG),
    "half of a sum": ("multiply_two(d0, d1, a[2], a[3], b[1]);", "", WRONG),
    "wrong vector of the piece": ("ROW(vector / FACTOR)", "ROW(vector % FACTOR)", ("race",)),
    "divergent product": (
        "if (vector <= last_vector) {\n",
        "if (vector <= last_vector) {\nsimd_sum(top[c][e]);\n",
        ("divergence",),
    ),
    "swapped address space": ("device int* table", "constant int* table", STRICT),
    "swapped address space of the pool": (
        "const device Copy*>(k",
        "const constant Copy*>(k",
        STRICT,
    ),
}


# The same where tokens are cut in chunks.
FAULTS_OF_SPLIT: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "rows see one token less": ("work[6] + (i)", "work[6] - 1 + (i)", WRONG),
    "no row sees more than the first": ("work[6] + (i)", "work[6]", WRONG),
    "rows see tokens of the next chunk": ("min(work[2], work[6] + (i))", "work[6] + (i)", WRONG),
    "wrong chunk": ("const int start = work[5];", "const int start = 0;", WRONG),
}


@pytest.mark.parametrize(
    ("fault", "split"),
    [*((fault, False) for fault in FAULTS), *((fault, True) for fault in FAULTS_OF_SPLIT)],
)
def test_planted_fault_is_caught(fault: str, split: bool, count: Counter[str]):
    old, new, rungs = (FAULTS_OF_SPLIT if split else FAULTS)[fault]

    def plant(kernel: Kernel, source: str) -> str:
        if not is_prefill(kernel):
            return source
        assert old in source
        source = source.replace(old, new)
        if rungs == STRICT and check(source).errors:
            raise ExecutionError(STRICT[0], 0, "refused")
        return source

    launcher = FiberLauncher(change=plant)
    setting = replace(SMALL, num_kv_heads=2, window=20, spans=((30, 50), (9, 41)))
    if split:
        setting = replace(setting, split=True, window=None)
    try:
        caught = None if setting.deviation(launcher) < MAX_DEVIATION else WRONG[0]
    except ExecutionError as error:
        caught = error.kind
    assert caught in rungs
    count["planted faults of prefill caught"] += 1


def is_prefill(kernel: Kernel) -> bool:
    return kernel.name.startswith("paged_prefill")
