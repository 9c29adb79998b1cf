from __future__ import annotations

import pytest

from pagedmlx.ops.device import threadgroups_at_once
from pagedmlx.ops.launch import Platform


@pytest.mark.parametrize(
    ("platform", "name", "threadgroups"),
    [
        (Platform.CUDA, "NVIDIA H200", 528),
        (Platform.CUDA, "something new", 400),
        (Platform.METAL, "Apple M1", 30),
        (Platform.METAL, "Apple M3 Max", 120),
        (Platform.METAL, "Apple M2 Ultra", 240),
    ],
)
def test_larger_gpus_get_more_threadgroups(
    platform: Platform, name: str, threadgroups: int
) -> None:
    assert threadgroups_at_once(platform, name) == threadgroups
