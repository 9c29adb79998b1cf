"""MLX and the kernel, executed on the processor, find the same most likely tokens."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import KernelError
from pagedmlx.ops.launch import Kernel
from pagedmlx.sampling.greedy import by_kernel, most_likely
from pagedmlx.sampling.sampler import Sampler, SampleRow
from tests.metal.greedy import GreedyCase, expected_tokens
from tests.metal.launcher import FiberLauncher
from tests.support.attention import to_numpy

DTYPES = ("float32", "float16", "bfloat16")
GREEDY = SampleRow(SamplingParams(temperature=0.0), 0, 0, 0)
DRAWN = SampleRow(SamplingParams(temperature=1.0), 0, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_logits", [1, 5, 33, 1025])
def test_mlx_finds_the_first_of_the_largest_or_none(dtype: str, num_logits: int):
    logits = GreedyCase(dtype, num_logits).logits
    np.testing.assert_array_equal(np.array(most_likely(logits)), expected_tokens(to_numpy(logits)))


@pytest.mark.parametrize("num_logits", [1, 12, 5001])
def test_a_kernel_that_agrees_is_found(num_logits: int):
    assert by_kernel(FiberLauncher(), DTYPES, num_logits)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("logit > top", "logit >= top"), ("|| logit != logit", ""), ("< INFINITY ?", "> 0.0f ?")],
)
def test_a_kernel_that_differs_is_refused(right: str, wrong: str):
    def plant(_: Kernel, source: str) -> str:
        assert right in source
        return source.replace(right, wrong)

    with pytest.raises(KernelError, match=r"other tokens than MLX in [1-7] rows of float16"):
        by_kernel(FiberLauncher(change=plant), ["float16"], 300)


def test_the_sampler_leaves_the_choice_to_it_where_nothing_is_drawn():
    asked: list[mx.array] = []

    def find(logits: mx.array) -> mx.array:
        asked.append(logits)
        return most_likely(logits)

    sampler = Sampler(find_most_likely=find)
    logits = mx.array([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    assert sampler.sample(logits, [GREEDY, GREEDY]).tolist() == [1, 0]
    assert len(asked) == 1
    assert sampler.sample(logits, [GREEDY, DRAWN])[0].item() == 1
    assert len(asked) == 1
