"""Cascade attention, executed: shared tokens attended once give what each sequence would find."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.kv.layout import AxisOrder
from pagedmlx.ops.base import AttentionParams, upload
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Kernel, Launcher
from tests.metal.cases import covering
from tests.metal.check import check
from tests.metal.cuda_map import with_cuda_map
from tests.metal.execute import ExecutionError
from tests.metal.launcher import FiberLauncher, RecordingLauncher
from tests.metal.mutate import WRONG_RESULT
from tests.support.attention import TOLERANCES, Case, make_case, write_step

# Of the tolerance that the GPU is given: sums here are as exact as float32 is.
MAX_DEVIATION = 0.25

OUTSIDE = "out_of_bounds"

CUT, WHOLE = 1 << 20, 1
"""Threadgroups at once: chunks of the fewest tokens, or of the most."""


@dataclass(frozen=True)
class Setting:
    """Everything that the launches depend on; ``shared`` tokens of whole blocks for each run."""

    dtype: str = "float16"
    head_dims: tuple[int, int] = (64, 64)
    factor: int = 2
    block_size: int = 16
    num_kv_heads: int = 2
    order: AxisOrder = AxisOrder.HEAD_MAJOR
    softcap: float | None = None
    sinks: bool = False
    decode: str = "lanes"
    wave: int = CUT
    # Of each sequence: its run, and its tokens beside the shared ones. Run 0 shares nothing.
    sequences: tuple[tuple[int, int], ...] = ((1, 1), (0, 70), (1, 66), (2, 3), (1, 17), (2, 90))
    shared: tuple[int, ...] = (0, 9, 2)  # blocks

    def __str__(self) -> str:
        skipped = ("sequences", "shared")
        values = (getattr(self, f.name) for f in fields(self) if f.name not in skipped)
        return "-".join(v.name if isinstance(v, AxisOrder) else str(v) for v in values)

    def make_case(self, launcher: Launcher) -> Case:
        """Sequences of a run hold the first one's blocks; their own copies of them hold NaN."""
        starts = [self.shared[run] * self.block_size + own - 1 for run, own in self.sequences]
        case = make_case(
            [(start, 1) for start in starts],
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            factor=self.factor,
            k_head_dim=self.head_dims[0],
            v_head_dim=self.head_dims[1],
            dtype=self.dtype,
            order=self.order,
            writer=InPlaceWriter(launcher),
        )
        host = case.batch.host
        tables = host.groups[0].block_tables.copy()
        keys, values = list(case.keys), list(case.values)
        firsts: dict[int, int] = {}
        for place, (run, _) in enumerate(self.sequences):
            first, num_blocks = firsts.setdefault(run, place), self.shared[run]
            if first == place or not num_blocks:
                continue
            num_tokens = num_blocks * self.block_size
            slots = np.concatenate(
                [
                    np.arange(self.block_size) + b * self.block_size
                    for b in tables[place, :num_blocks]
                ]
            )
            nan = [
                mx.full((num_tokens, self.num_kv_heads, dim), np.nan, getattr(mx, self.dtype))
                for dim in self.head_dims
            ]
            case.store.write(0, *nan, mx.array(slots))
            case.store.commit()
            tables[place, :num_blocks] = tables[first, :num_blocks]
            for arrays in (keys, values):
                arrays[place] = np.concatenate(
                    [arrays[first][:num_tokens], arrays[place][num_tokens:]]
                )
        group = replace(host.groups[0], block_tables=tables)
        batch = upload(replace(host, groups=(group,)))
        return replace(case, batch=batch, keys=keys, values=values)

    def params(self) -> AttentionParams:
        heads = self.num_kv_heads * self.factor
        sinks = mx.array(np.linspace(-2.0, 3.0, heads, dtype=np.float32)) if self.sinks else None
        return AttentionParams(self.head_dims[0] ** -0.5, None, sinks, self.softcap)

    def run(self, launcher: Launcher, case: Case, cascade: str = "on") -> np.ndarray:
        backend = KernelBackend(launcher, self.wave, decode=self.decode, cascade=cascade)
        return case.attend(backend, self.params())

    def deviation(self, launcher: Launcher) -> float:
        """Largest error against float64, in units of the type's tolerance; infinite for NaN."""
        case = self.make_case(launcher)
        output, expected = self.run(launcher, case), case.expected(self.params())
        error = np.abs(output - expected) / (TOLERANCES[self.dtype] * (1 + np.abs(expected)))
        return float(np.where(np.isnan(error), np.inf, error).max())


AXES = {
    "dtype": tuple(TOLERANCES),
    "head_dims": ((64, 64), (80, 80), (128, 128), (256, 256), (192, 128)),
    "factor": (1, 3, 8, 16),
    "block_size": (4, 16, 64),
    "num_kv_heads": (1, 2),
    "order": tuple(AxisOrder),
    "softcap": (None, 20.0),
    "sinks": (False, True),
    "decode": ("lanes", "matrices"),
    "wave": (CUT, WHOLE),
}
SETTINGS = [Setting(**axes) for axes in covering(AXES)]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_shared_tokens_attended_once_give_the_answer(setting: Setting, count: Counter[str]) -> None:
    launcher = FiberLauncher()
    assert setting.deviation(launcher) < MAX_DEVIATION
    assert _words(launcher) == {"write", "decode", "prefill", "merge"}
    count["variants of cascades executed"] += 1


def test_every_variant_passes_the_strict_check() -> None:
    recorder = RecordingLauncher()
    for setting in SETTINGS:
        setting.run(recorder, setting.make_case(recorder))
    sources = {
        text: kernel
        for text, kernel in recorder.sources.items()
        if kernel.name.startswith(("paged_prefill", "paged_merge"))
    }
    assert sources
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(check, sources))
    for report, kernel in zip(reports, sources.values(), strict=True):
        assert not report.diagnostics, kernel.name
        assert report.threadgroup_bytes == kernel.threadgroup_bytes, kernel.name


def test_it_holds_with_the_map_of_lanes_that_cuda_has() -> None:
    launcher = FiberLauncher(change=with_cuda_map)
    few = Setting(factor=3, head_dims=(80, 96), sequences=((1, 1), (1, 5)), shared=(0, 2))
    assert few.deviation(launcher) < MAX_DEVIATION


def test_order_of_threads_changes_no_bit() -> None:
    setting = Setting(factor=3)
    outputs = [
        setting.run(launcher, setting.make_case(launcher))
        for launcher in (FiberLauncher(), FiberLauncher(seed=4000))
    ]
    np.testing.assert_array_equal(*outputs)


def test_a_grid_rounded_up_as_in_cuda_harms_nothing() -> None:
    assert Setting(factor=5).deviation(FiberLauncher(rounded=True)) < MAX_DEVIATION


def test_rows_are_written_by_the_kernel_as_without_a_cascade() -> None:
    setting = Setting(dtype="float32", factor=4)
    outputs = []
    for cascade in ("on", "off"):
        launcher = FiberLauncher()
        case = setting.make_case(launcher)
        write_step(case)
        launcher.executed.clear()
        outputs.append(setting.run(launcher, case, cascade))
        assert "write" not in _words(launcher)
        assert ("prefill" in _words(launcher)) == (cascade == "on")
    np.testing.assert_allclose(*outputs, atol=1e-5)


# What is planted in which kernel, and the rung that must catch it.
FAULTS = [
    ("prefill", "plan[work[0] + (i)]", "work[0] + (i)", OUTSIDE),
    ("prefill", "const int start = work[5];", "const int start = 0;", WRONG_RESULT),
    ("prefill", "#define END(i) work[2]", "#define END(i) (work[2] - 1)", WRONG_RESULT),
    ("prefill", "+ vector - first_vector;", "+ vector;", "race"),
    ("prefill", "stats[2 * place + 1] = sum;", "", WRONG_RESULT),
    ("merge", "num_own + work[4];", "num_own;", WRONG_RESULT),
    ("merge", "shared_vector / SHARED * work[4];", "shared_vector / SHARED;", WRONG_RESULT),
    ("merge", "work[5] * FACTOR + head % FACTOR", "work[5] * FACTOR", WRONG_RESULT),
    ("merge", "(i) - num_own) * SHARED_STRIDE) + (e)", "(i)) * SHARED_STRIDE) + (e)", OUTSIDE),
]


@pytest.mark.parametrize(("kernel", "old", "new", "rung"), FAULTS, ids=str)
def test_planted_fault_is_caught(
    kernel: str, old: str, new: str, rung: str, count: Counter[str]
) -> None:
    def change(what: Kernel, source: str) -> str:
        if not what.name.startswith(f"paged_{kernel}"):
            return source
        assert old in source
        return source.replace(old, new)

    # More vectors than a threadgroup takes, and several chunks.
    setting = Setting(factor=16)
    try:
        deviation = setting.deviation(FiberLauncher(change=change))
        found = WRONG_RESULT if deviation > MAX_DEVIATION else "nothing"
    except ExecutionError as error:
        found = error.kind
    assert found == rung
    count["planted faults of cascades caught"] += 1


def _words(launcher: FiberLauncher) -> set[str]:
    return {name.split("_")[1] for name in launcher.executed}
