"""Who attends prefill chunks: the kernel, or a gather and MLX's own attention."""

from __future__ import annotations

from typing import Any

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


def choose(
    platform: Platform = Platform.METAL,
    path: PrefillPath = PrefillPath.AUTO,
    rows: int = 100,
    tokens: int = 400,
    is_masked: bool = False,
    wave: int = 64,
    **shape: Any,
) -> PrefillPath:
    chooser = PrefillChooser(path, platform, wave)
    return chooser.choose(variant(**shape), rows, tokens, is_masked)


def test_on_metal_the_kernel_is_taken_where_it_should_be_faster():
    assert choose() == "kernel"
    assert choose(dtype="bfloat16", k_head_dim=128) == "kernel"
    assert choose(dtype="float32") == "gather"
    assert choose(k_head_dim=192, v_head_dim=128) == "gather"
    assert choose(softcap=30.0) == "kernel"


@pytest.mark.parametrize("platform", Platform)
def test_a_forced_path_is_taken_where_it_can(platform: Platform):
    assert choose(platform, PrefillPath.GATHER) == "gather"
    assert choose(platform, PrefillPath.KERNEL, dtype="float32", k_head_dim=256) == "kernel"
    assert choose(platform, PrefillPath.SPLIT, rows=300) == "split"
    # All rows must see what is cut.
    assert choose(platform, PrefillPath.SPLIT, is_masked=True) == "kernel"


@pytest.mark.parametrize("platform", Platform)
def test_scores_are_kept_where_neither_the_kernel_nor_a_fused_attention_is_taken(
    platform: Platform,
):
    auto, kernel, gather = (
        PrefillChooser(path, platform, 64)
        for path in (PrefillPath.AUTO, PrefillPath.KERNEL, PrefillPath.GATHER)
    )
    assert not auto.keeps_scores(variant(k_head_dim=128))
    for kept in (variant("float32"), variant(k_head_dim=256)):
        assert auto.keeps_scores(kept)
        assert not kernel.keeps_scores(kept)
    assert auto.keeps_scores(variant(softcap=30.0)) is (platform is Platform.CUDA)
    assert gather.keeps_scores(variant())
    assert kernel.keeps_scores(variant(k_head_dim=72))


@pytest.mark.parametrize("head_dims", [(72, 72), (512, 512), (64, 40)])
@pytest.mark.parametrize("path", [PrefillPath.KERNEL, PrefillPath.SPLIT])
def test_head_sizes_that_the_kernel_lacks_are_gathered_also_where_it_is_forced(head_dims, path):
    k_head_dim, v_head_dim = head_dims
    assert choose(path=path, k_head_dim=k_head_dim, v_head_dim=v_head_dim) == "gather"


@pytest.mark.parametrize(
    "shape", [{"dtype": "float32"}, {"k_head_dim": 192, "v_head_dim": 128}, {"softcap": 30.0}]
)
def test_on_cuda_mlx_attends_whatever_needs_no_plan(shape: dict[str, Any]):
    assert choose(Platform.CUDA, **shape) == "gather"


@pytest.mark.parametrize("platform", Platform)
def test_a_short_chunk_that_would_leave_the_gpu_idle_is_split(platform: Platform):
    def is_split(rows: int, before: int, is_masked: bool = False, wave: int = 528) -> bool:
        tokens = before + rows
        found = choose(platform, rows=rows, tokens=tokens, is_masked=is_masked, wave=wave)
        return found == "split"

    assert is_split(96, 4000)
    assert is_split(9, 1024)
    assert not is_split(9, 1023)
    assert not is_split(257, 4000)
    assert not is_split(96, 4000, is_masked=True)
    # 96 rows of 4 query heads are 12 tiles, for each of 2 KV heads.
    assert is_split(96, 4000, wave=48)
    assert not is_split(96, 4000, wave=47)
    chooser = PrefillChooser(PrefillPath.AUTO, platform, 528)
    chooser.may_split = False
    assert chooser.choose(variant(), 96, 4096, False) != "split"


def cuda_chooser() -> PrefillChooser:
    return PrefillChooser(PrefillPath.AUTO, Platform.CUDA, 1)


def count_kernel(chooser: PrefillChooser, rows: int, tokens: int, times: int = 2_000) -> int:
    chosen = [chooser.choose(variant(), rows, tokens, False) for _ in range(times)]
    return chosen.count(PrefillPath.KERNEL)


@pytest.mark.parametrize(("rows", "tokens"), [(512, 512), (512, 4096), (2048, 8192)])
def test_on_cuda_a_shape_gets_a_plan_once_it_would_have_cost_as_much(rows: int, tokens: int):
    # 2 KV heads of 4 query heads each, 64 elements of K and as many of V.
    work = rows * (tokens - rows // 2) * 8 * 128
    chooser = cuda_chooser()
    assert count_kernel(chooser, rows, tokens) == -(-PLAN_WORK // work) - 1
    assert chooser.choose(variant(), rows, tokens, False) == "gather"
    assert chooser.choose(variant(), rows, tokens + 1, False) == "kernel"
    assert chooser.choose(variant(), rows, tokens, True) == "kernel"
    assert chooser.choose(variant("bfloat16"), rows, tokens, False) == "kernel"


def test_on_cuda_a_chunk_that_costs_as_much_as_a_plan_gets_one_at_once():
    assert cuda_chooser().choose(variant(), 16_384, 32_768, False) == "gather"


def test_a_shape_that_mlx_has_forgotten_the_plan_of_must_earn_it_again():
    chooser = cuda_chooser()
    assert count_kernel(chooser, 2048, 8192) > 0
    for rows in range(256):
        chooser.choose(variant(), 9 + rows, 4096, False)
    assert count_kernel(chooser, 2048, 8192) > 0


def test_ever_new_shapes_all_go_by_the_kernel():
    chooser = cuda_chooser()
    assert all(chooser.choose(variant(), 64, 64 + n, False) == "kernel" for n in range(1_000))
