"""FiberLauncher: runs the package's kernels as Metal source on the processor, checked.

It keeps what a GPU would do: kernels store through their inputs, into the very arrays of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from pagedmlx.ops.launch import Kernel, Launch, MLXLauncher, Platform
from tests.metal.execute import Output, execute
from tests.metal.generated import generated_source

IN_PLACE = ("k_pool", "v_pool")
SCRATCH = ("k_scratch", "v_scratch")
"""Inputs that kernels may store through."""


class MetalSources:
    """The exact sources that MLX would hand to Metal, each obtained once."""

    def __init__(self) -> None:
        self._sources: dict[tuple[object, ...], str] = {}

    def of(self, launch: Launch) -> str:
        """Source of a launch."""
        # MLX declares small arrays and 0-dimensional ones differently.
        forms = tuple((min(array.size, 8), array.ndim, array.dtype) for array in launch.inputs)
        key = (launch.kernel.name, forms)
        if key not in self._sources:
            self._sources[key] = metal_source(launch)
        return self._sources[key]


def metal_source(launch: Launch) -> str:
    """The exact source that MLX would hand to Metal for a launch."""
    function = MLXLauncher(Platform.METAL).function(launch.kernel)
    return generated_source(
        lambda: function(
            inputs=[mx.zeros(array.shape, array.dtype) for array in launch.inputs],
            grid=(launch.num_threads, 1, 1),
            threadgroup=(launch.threadgroup, 1, 1),
            output_shapes=launch.output_shapes,
            output_dtypes=launch.output_dtypes,
            verbose=True,
        )
    )


def as_numpy(array: mx.array) -> np.ndarray:
    """The array's own memory, writable; bfloat16 as the uint16 of the same bits."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    mx.eval(array)
    mx.synchronize()
    return np.array(array, copy=False)


def from_numpy(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """The inverse of `as_numpy`, copying."""
    return mx.array(array).view(dtype) if dtype == mx.bfloat16 else mx.array(array).astype(dtype)


@dataclass
class FiberLauncher:
    """See ``pagedmlx.ops.launch.Launcher``.

    Attributes:
        seed: Order in which threads run; every launch gets the next one.
        change: Applied to each source before it runs; for planted faults.
        in_place: Names of the inputs that kernels may store through.
        rounded: Whether the grid is rounded up to whole threadgroups, as CUDA does.
        executed: Names of the kernels that ran, with how often.
    """

    seed: int = 0
    change: Callable[[Kernel, str], str] | None = None
    in_place: Collection[str] = IN_PLACE
    rounded: bool = False
    platform: Platform = Platform.METAL
    executed: dict[str, int] = field(default_factory=dict)
    _sources: MetalSources = field(default_factory=MetalSources)

    def view(self, pool: mx.array) -> mx.array:
        """The array itself: whoever leaves it is to be caught."""
        return pool

    def __call__(self, launch: Launch) -> list[mx.array]:
        kernel = launch.kernel
        source = self._sources.of(launch)
        if self.change:
            source = self.change(kernel, source)
        inputs = dict(zip(kernel.input_names, map(as_numpy, launch.inputs), strict=True))
        in_place = [name for name in SCRATCH if name in kernel.input_names]
        if "written" in kernel.output_names:
            in_place += self.in_place
        outputs = {
            name: Output(tuple(shape), numpy_dtype(dtype))
            for name, shape, dtype in zip(
                kernel.output_names, launch.output_shapes, launch.output_dtypes, strict=True
            )
        }
        threads = launch.num_threads
        if self.rounded:
            threads += -threads % launch.threadgroup
        self.seed += 1
        self.executed[kernel.name] = self.executed.get(kernel.name, 0) + 1
        results = execute(
            source,
            inputs,
            outputs,
            (threads, 1, 1),
            (launch.threadgroup, 1, 1),
            in_place=in_place,
            strided=kernel.strided,
            seed=self.seed,
        )
        for name in in_place:
            inputs[name][...] = results[name]
        return [
            from_numpy(results[name], dtype)
            for name, dtype in zip(kernel.output_names, launch.output_dtypes, strict=True)
        ]


def numpy_dtype(dtype: mx.Dtype) -> np.dtype:
    """numpy's type for an MLX type; uint16 for bfloat16."""
    name = "uint16" if dtype == mx.bfloat16 else str(dtype).rpartition(".")[2]
    return np.dtype(name)


@dataclass
class RecordingLauncher:
    """Runs nothing: keeps each launch's Metal source, and returns zeros of the right shapes.

    Attributes:
        sources: The sources, each once.
    """

    sources: dict[str, Kernel] = field(default_factory=dict)
    platform: Platform = Platform.METAL
    _made: MetalSources = field(default_factory=MetalSources)

    def view(self, pool: mx.array) -> mx.array:
        """See ``Launcher.view``."""
        return pool

    def __call__(self, launch: Launch) -> list[mx.array]:
        """See ``Launcher``."""
        self.sources[self._made.of(launch)] = launch.kernel
        return [
            mx.zeros(shape, dtype)
            for shape, dtype in zip(launch.output_shapes, launch.output_dtypes, strict=True)
        ]
