"""Cascade attention, executed: shared tokens attended once give what each sequence would find."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pagedmlx.ops.launch import Kernel
from tests.metal.cascades import SETTINGS, Setting
from tests.metal.check import check
from tests.metal.cuda_map import with_cuda_map
from tests.metal.execute import ExecutionError
from tests.metal.launcher import FiberLauncher, RecordingLauncher
from tests.metal.mutate import WRONG_RESULT
from tests.support.attention import write_step

# Of the tolerance that the GPU is given: sums here are as exact as float32 is.
MAX_DEVIATION = 0.25

OUTSIDE = "out_of_bounds"


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
    ("prefill", "#define END(i) min(work[2],", "#define END(i) min(work[2] - 1,", WRONG_RESULT),
    ("prefill", "+ vector - first_vector;", "+ vector;", "race"),
    ("prefill", "stats[2 * place + 1] = sum;", "", WRONG_RESULT),
    ("merge", "num_own + work[4];", "num_own;", WRONG_RESULT),
    ("merge", "/ (vectors) * (at)[1])", "/ (vectors))", WRONG_RESULT),
    ("merge", "head % FACTOR) % (vectors)", "head % 1) % (vectors)", WRONG_RESULT),
    ("merge", "((i) - num_own) * (long(H)", "(i) * (long(H)", OUTSIDE),
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
