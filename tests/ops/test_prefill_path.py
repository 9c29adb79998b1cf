"""Who attends prefill chunks: the kernel, or a gather and MLX's own attention."""

from __future__ import annotations

import pytest

from pagedmlx.ops.launch import Platform
from pagedmlx.ops.prefill import PrefillVariant
from pagedmlx.ops.prefill_path import PLAN_WORK, PrefillChooser, PrefillPath
from pagedmlx.ops.variants import PoolShape


def variant(
    dtype: str = "float16",
    k_head_dim: int = 64,
    v_head_dim: int | None = None,
    softcap: float | None = None,
) -> PrefillVariant:
    shape = PoolShape(dtype, 2, k_head_dim, v_head_dim or k_head_dim, block_size=16)
    return PrefillVariant(shape, dtype, 4, softcap=softcap)


def taken(
    platform: Platform = Platform.METAL,
    path: PrefillPath = PrefillPath.AUTO,
    **shape: object,
) -> bool:
    chooser = PrefillChooser(path, platform)
    return chooser.takes_kernel(variant(**shape), 100, 400, False)  # type: ignore[arg-type]


def test_on_metal_the_kernel_is_taken_where_it_should_be_faster():
    assert taken()
    assert taken(dtype="bfloat16", k_head_dim=128)
    assert not taken(dtype="float32")
    assert not taken(k_head_dim=192, v_head_dim=128)


@pytest.mark.parametrize("platform", Platform)
def test_a_forced_path_is_taken(platform: Platform):
    assert not taken(platform, PrefillPath.GATHER)
    assert taken(platform, PrefillPath.KERNEL, dtype="float32", k_head_dim=256)


@pytest.mark.parametrize("head_dims", [(72, 72), (512, 512), (64, 40)])
def test_head_sizes_that_the_kernel_lacks_are_gathered_also_where_it_is_forced(head_dims):
    k_head_dim, v_head_dim = head_dims
    assert not taken(path=PrefillPath.KERNEL, k_head_dim=k_head_dim, v_head_dim=v_head_dim)


@pytest.mark.parametrize(
    "shape", [{"dtype": "float32"}, {"k_head_dim": 192, "v_head_dim": 128}, {"softcap": 30.0}]
)
def test_on_cuda_mlx_attends_whatever_needs_no_plan(shape: dict[str, object]):
    assert not taken(Platform.CUDA, **shape)  # type: ignore[arg-type]


def count_kernel(chooser: PrefillChooser, rows: int, tokens: int, times: int = 2_000) -> int:
    return sum(chooser.takes_kernel(variant(), rows, tokens, False) for _ in range(times))


@pytest.mark.parametrize(("rows", "tokens"), [(512, 512), (512, 4096), (2048, 8192)])
def test_on_cuda_a_shape_gets_a_plan_once_it_has_cost_as_much(rows: int, tokens: int):
    # 2 KV heads of 4 query heads each, 64 elements of K and as many of V.
    work = rows * (tokens - rows // 2) * 8 * 128
    chooser = PrefillChooser(PrefillPath.AUTO, Platform.CUDA)
    assert count_kernel(chooser, rows, tokens) == -(-PLAN_WORK // work)
    assert not chooser.takes_kernel(variant(), rows, tokens, False)
    assert chooser.takes_kernel(variant(), rows, tokens + 1, False)
    assert chooser.takes_kernel(variant(), rows, tokens, True)
    assert chooser.takes_kernel(variant("bfloat16"), rows, tokens, False)


def test_a_shape_that_mlx_has_forgotten_the_plan_of_must_earn_it_again():
    chooser = PrefillChooser(PrefillPath.AUTO, Platform.CUDA)
    assert count_kernel(chooser, 2048, 8192) > 0
    for rows in range(256):
        chooser.takes_kernel(variant(), 9 + rows, 4096, False)
    assert count_kernel(chooser, 2048, 8192) > 0


def test_ever_new_shapes_all_go_by_the_kernel():
    chooser = PrefillChooser(PrefillPath.AUTO, Platform.CUDA)
    assert all(chooser.takes_kernel(variant(), 64, 64 + n, False) for n in range(1_000))
