from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from pagedmlx.errors import KernelError
from pagedmlx.ops import launch
from pagedmlx.ops.launch import Kernel, Launch, MLXLauncher, Platform

KERNEL = Kernel("decode_of_some_kind", "out[0] = in[0];", ("in",), ("out",))


def call_of(kernel: Kernel) -> Launch:
    return Launch(kernel, [mx.ones(8)], 8, 8, [(8,)], [mx.float32])


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> MLXLauncher:
    """A launcher whose compiler makes a function that doubles its input, or refuses."""

    def compiler(**kernel: Any) -> Any:
        if "refused" in kernel["source"]:
            raise RuntimeError("no such word\nin line 3")

        def function(**arguments: Any) -> list[mx.array]:
            assert arguments["output_shapes"] == [(8,)]
            return [2 * arguments["inputs"][0]]

        return function

    monkeypatch.setattr(launch.mx.fast, "metal_kernel", compiler)
    return MLXLauncher(Platform.METAL)


def test_a_kernel_is_compiled_once_and_then_only_launched(launcher: MLXLauncher) -> None:
    for _ in range(3):
        (output,) = launcher(call_of(KERNEL))
        assert output.tolist() == [2.0] * 8
    assert list(launcher._functions) == [KERNEL.name]


def test_a_kernel_that_fails_is_named_with_the_reason_in_one_line(launcher: MLXLauncher) -> None:
    refused = Kernel("prefill_refused", "refused", ("in",), ("out",))
    for _ in range(2):
        with pytest.raises(KernelError) as caught:
            launcher(call_of(refused))
        assert str(caught.value) == ("kernel prefill_refused fails on this device: no such word")
        assert "gather" in caught.value.hint
    assert not launcher._functions


def test_mlx_itself_launches_where_there_is_metal_and_is_named_where_not() -> None:
    if mx.metal.is_available():
        (output,) = MLXLauncher(Platform.METAL)(call_of(KERNEL))
        assert output[0].item() == 1.0
        return
    with pytest.raises(KernelError, match="decode_of_some_kind fails on this device"):
        MLXLauncher(Platform.METAL)(call_of(KERNEL))
