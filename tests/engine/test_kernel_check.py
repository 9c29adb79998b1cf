"""What ``doctor --kernels`` finds out, with the kernels executed on the processor."""

from __future__ import annotations

import mlx.core as mx
import pytest

from pagedmlx.engine import kernel_check
from pagedmlx.engine.kernel_check import TOLERANCES, check_kernels
from pagedmlx.ops.launch import Kernel, Launch
from tests.metal.launcher import FiberLauncher


def test_without_a_gpu_gather_serves_and_nothing_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_check, "gpu_platform", lambda: None)
    report = check_kernels()
    assert (report.path, report.ok, report.checks) == ("gather", True, ())
    assert "need a GPU" in report.reason


def test_right_kernels_agree_and_each_of_them_runs():
    launcher = FiberLauncher()
    report = check_kernels(launcher)
    assert report.ok
    assert report.path == "kernels"
    for kernel in (
        *("write", "copy_blocks", "decode", "merge", "prefill", "gather", "rope_write"),
        "most_likely",
    ):
        assert any(name.startswith(f"paged_{kernel}_") for name in launcher.executed)


def test_a_wrong_kernel_is_named_and_gather_expected():
    def plant(kernel: Kernel, source: str) -> str:
        if "prefill" not in kernel.name:
            return source
        return source.replace("position >= my_end[c][e]", "position > my_end[c][e] + 7")

    report = check_kernels(FiberLauncher(change=plant))
    failed = {check.name for check in report.checks if not check.ok}
    assert failed == {
        *("prefill, float16", "prefill, window, bfloat16", "prefill in parts, float16"),
        "prefill after RoPE, float16",
    }
    assert (report.ok, report.path) == (False, "gather")
    assert "prefill, float16" in report.reason


def test_a_wrong_rotation_is_named():
    def plant(kernel: Kernel, source: str) -> str:
        return source.replace("old_x * cosine - old_y * sine", "old_x * cosine + old_y * sine")

    report = check_kernels(FiberLauncher(change=plant))
    failed = {check.name for check in report.checks if not check.ok}
    assert failed == {"decode after RoPE, bfloat16", "prefill after RoPE, float16"}


def test_a_wrong_choice_of_tokens_is_named_and_no_reason_to_gather():
    def plant(kernel: Kernel, source: str) -> str:
        return source.replace("logit > top", "logit >= top")

    report = check_kernels(FiberLauncher(change=plant))
    failed = {check.name for check in report.checks if not check.ok}
    assert failed == {f"most likely token, {dtype}" for dtype in TOLERANCES}
    assert (report.ok, report.path) == (False, "kernels")


def test_a_kernel_that_does_not_compile_hides_no_other():
    inner = FiberLauncher()

    class Refusing:
        platform = inner.platform
        view = inner.view

        def __call__(self, launch: Launch) -> list[mx.array]:
            if "merge" in launch.kernel.name:
                raise RuntimeError("program_source:7: error: use of undeclared identifier\nmore")
            return inner(launch)

    report = check_kernels(Refusing())
    failed, *others = [check for check in report.checks if not check.ok]
    assert [check.name for check in others] == ["prefill in parts, float16"]
    assert failed.name == "decode in parts, bfloat16"
    assert "undeclared identifier" in str(failed.problem)
    assert "\n" not in str(failed.problem)
