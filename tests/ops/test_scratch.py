"""What layers gather lies in one place, which is given back when nothing runs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.ops.base import AttentionParams
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Launch
from pagedmlx.ops.scratch import ALIGNMENT, Scratch
from pagedmlx.ops.variants import GatherVariant, PoolShape
from tests.metal.launcher import FiberLauncher
from tests.support.attention import make_case

POOL = PoolShape("float32", num_kv_heads=2, k_head_dim=16, v_head_dim=8, block_size=16)
VARIANT = GatherVariant(POOL, "float32")


def test_parts_lie_beside_each_other() -> None:
    scratch = Scratch(FiberLauncher())
    scratch.reserve(VARIANT, 5 * ALIGNMENT)
    keys, values = scratch.bound(VARIANT)
    for array, dim in ((keys, 16), (values, 8)):
        flat = np.array(array, copy=False).reshape(-1)
        flat[: 5 * ALIGNMENT * 2 * dim] = np.arange(5 * ALIGNMENT * 2 * dim)
    first = scratch.part(VARIANT, 0, 13)
    second = scratch.part(VARIANT, 2 * ALIGNMENT, 3 * ALIGNMENT)
    for found, start, count in ((first, 0, 13), (second, 2 * ALIGNMENT, 3 * ALIGNMENT)):
        for array, dim in zip(found, (16, 8), strict=True):
            expected = start * 2 * dim + np.arange(2 * count * dim).reshape(1, 2, count, dim)
            np.testing.assert_array_equal(np.array(array), expected)


def test_a_larger_step_takes_more_and_a_smaller_one_the_same() -> None:
    scratch = Scratch(FiberLauncher())
    scratch.reserve(VARIANT, 10_000)
    large = scratch.bound(VARIANT)
    for count in (16, 9000, 10_000):
        scratch.reserve(VARIANT, count)
        assert all(a is b for a, b in zip(scratch.bound(VARIANT), large, strict=True))
    scratch.reserve(VARIANT, 30_000)
    assert scratch.bound(VARIANT)[0].size >= 30_000 * 2 * 16


class Watching(FiberLauncher):
    """Notes where each gather goes to."""

    def __call__(self, launch: Launch) -> list[mx.array]:
        if "_gather_" in launch.kernel.name:
            self.places.append(np.array(launch.inputs[0], copy=False).ctypes.data)
        return super().__call__(launch)

    @property
    def places(self) -> list[int]:
        return self.__dict__.setdefault("_places", [])


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_all_layers_and_steps_gather_to_one_place_until_nothing_runs(
    softcap: float | None,
) -> None:
    launcher = Watching()
    backend = KernelBackend(launcher, prefill="gather")
    spans = [(40, 1), (60, 30), (17, 20)]
    cases = [make_case(spans, seed=seed, writer=InPlaceWriter(launcher)) for seed in range(3)]
    for case in cases:
        case.check(backend, AttentionParams(scale=0.3, softcap=softcap))
    assert len(launcher.places) == 2 * len(cases)
    assert len(set(launcher.places)) == 1
    mx.synchronize()
    before = mx.get_active_memory()
    backend.rest()
    assert mx.get_active_memory() < before
