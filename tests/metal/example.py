"""Small kernels for the tests of the tool itself: a body, its arrays, and a run of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from tests.metal.execute import Output, execute
from tests.metal.generated import generated_source
from tests.metal.launcher import from_numpy

FLOATS = Output((64,), np.dtype(np.float32))


@dataclass
class Example:
    """A kernel with one output `out`, launched over `threads` threads in groups of `group`."""

    body: str
    header: str = ""
    inputs: Mapping[str, np.ndarray] = field(default_factory=lambda: {"x": arange(64)})
    out: Output = FLOATS
    threads: int = 64
    group: int = 64
    in_place: tuple[str, ...] = ()
    bfloat16: tuple[str, ...] = ()  # the arrays of uint16 that are to be declared bfloat16

    def source(self) -> str:
        kernel = mx.fast.metal_kernel(
            name="example",
            input_names=list(self.inputs),
            output_names=["out"],
            source=self.body,
            header=self.header,
        )
        return generated_source(
            lambda: kernel(
                inputs=[
                    from_numpy(array, mx.bfloat16) if name in self.bfloat16 else mx.array(array)
                    for name, array in self.inputs.items()
                ],
                grid=(self.threads, 1, 1),
                threadgroup=(self.group, 1, 1),
                output_shapes=[self.out.shape],
                output_dtypes=[
                    mx.bfloat16
                    if "out" in self.bfloat16
                    else getattr(mx, np.dtype(self.out.dtype).name)
                ],
                verbose=True,
            )
        )

    def run(self, seed: int = 0) -> dict[str, np.ndarray]:
        return execute(
            self.source(),
            self.inputs,
            {"out": self.out},
            (self.threads, 1, 1),
            (self.group, 1, 1),
            in_place=self.in_place,
            seed=seed,
        )

    def out_of(self, seed: int = 0) -> np.ndarray:
        return self.run(seed)["out"]


def arange(count: int, dtype: type = np.float32) -> np.ndarray:
    return np.arange(count, dtype=dtype)
