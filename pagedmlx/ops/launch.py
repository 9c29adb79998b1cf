"""Kernel texts and their launches; one launcher hands both to Metal or to CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from pagedmlx.errors import KernelError, first_line
from pagedmlx.ops.sources import read_source

MAX_THREADGROUP_BYTES = 32 * 1024
"""Threadgroup memory that every Apple GPU has."""
CUDA_THREADGROUP_BYTES = 48 * 1024
"""That a kernel of CUDA gets without asking for more; cuda_matrix.h relies on it too."""

SIMD_WIDTH = 32

MIN_ELEMENTS = 8
"""MLX declares an array of fewer differently to a kernel, which would be another kernel."""


class Platform(StrEnum):
    """Whose compiler takes the kernels."""

    METAL = "metal"
    CUDA = "cuda"

    @property
    def threadgroup_bytes(self) -> int:
        """Threadgroup memory that a kernel may take."""
        return MAX_THREADGROUP_BYTES if self is Platform.METAL else CUDA_THREADGROUP_BYTES


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's text with all of its constants.

    Attributes:
        name: A name that no other text has.
        source: The body of the function, in Metal's language.
        input_names: What the body calls its inputs.
        output_names: What it calls its outputs.
        threadgroup_bytes: Threadgroup memory that it takes; on CUDA ``prefill.metal`` takes twice
            that where there is room.
        headers: Files that go before it, and before few others.
        cuda_headers: Files that say in CUDA what only such texts use of Metal.
        strided: Whether it takes inputs as they lie in memory; others get copies where need be.
    """

    name: str
    source: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    threadgroup_bytes: int = 0
    headers: tuple[str, ...] = ()
    cuda_headers: tuple[str, ...] = ()
    strided: bool = False


class Launch(NamedTuple):
    """One call of a kernel; a tuple, because a step makes a hundred of them.

    Attributes:
        kernel: What runs.
        inputs: One array for each input name.
        num_threads: Size of the grid.
        threadgroup: Threads of a threadgroup.
        output_shapes: One for each output name.
        output_dtypes: Likewise.
    """

    kernel: Kernel
    inputs: list[mx.array]
    num_threads: int
    threadgroup: int
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]


class Launcher(Protocol):
    """Runs kernels.

    Attributes:
        platform: Whose.
    """

    platform: Platform

    def __call__(self, launch: Launch) -> list[mx.array]:
        """The outputs, in the order of their names; lazy."""
        ...

    def view(self, pool: mx.array) -> mx.array:
        """What to bind in place of a pool array that kernels index by themselves."""
        ...


class MLXLauncher:
    """Compiles each text once, by MLX, and calls it.

    Args:
        platform: Whose compiler.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        common = read_source("common.h")
        if platform is Platform.CUDA:
            common = read_source("cuda_compat.h") + common
            self._compile: Callable[..., Any] = mx.fast.cuda_kernel
        else:
            self._compile = mx.fast.metal_kernel
        self._header = common
        self._functions: dict[str, Any] = {}

    def __call__(self, launch: Launch) -> list[mx.array]:
        """See ``Launcher``; a kernel's first launch is waited for.

        Raises:
            KernelError: The kernel can't be compiled or launched on this device.
        """
        function = self._functions.get(launch.kernel.name)
        if function is not None:
            return self._call(function, launch)
        kernel = launch.kernel
        assert kernel.threadgroup_bytes <= self.platform.threadgroup_bytes, kernel.name
        try:
            outputs = self._call(self.function(kernel), launch)
            # MLX compiles when a launch is evaluated, and doesn't say for which kernel it failed.
            mx.eval(outputs)
        except Exception as error:
            self._functions.pop(kernel.name, None)
            raise KernelError(
                f"kernel {kernel.name} fails on this device: {first_line(error)}",
                hint="--attention-backend gather does without, and please report it",
            ) from error
        return outputs

    @property
    def kernel_names(self) -> list[str]:
        """Of the kernels that have been launched."""
        return list(self._functions)

    def view(self, pool: mx.array) -> mx.array:
        """The first block: the same memory, which kernels index past.

        MLX ends a command buffer once the elements of the arrays that were bound to it exceed a
        limit, counting them each time: a large pool would end one at every launch.
        """
        view = pool[:1]
        mx.eval(view)
        return view

    def _call(self, function: Any, launch: Launch) -> list[mx.array]:
        return function(
            inputs=launch.inputs,
            grid=(launch.num_threads, 1, 1),
            threadgroup=(launch.threadgroup, 1, 1),
            output_shapes=launch.output_shapes,
            output_dtypes=launch.output_dtypes,
        )

    def function(self, kernel: Kernel) -> Any:
        """MLX's function for a kernel, made once."""
        headers = kernel.headers
        if self.platform is Platform.CUDA:
            headers = kernel.cuda_headers + headers
        header = self._header + "".join(map(read_source, headers))
        function = self._compile(
            name=kernel.name,
            input_names=list(kernel.input_names),
            output_names=list(kernel.output_names),
            source=kernel.source,
            header=header,
            ensure_row_contiguous=not kernel.strided,
        )
        self._functions[kernel.name] = function
        return function


def gpu_platform() -> Platform | None:
    """The platform of the default device; None on the CPU."""
    if mx.default_device() != mx.Device(mx.gpu):
        return None
    return Platform.METAL if mx.metal.is_available() else Platform.CUDA
