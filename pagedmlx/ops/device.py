"""How many threadgroups a GPU runs at once, by its name: MLX tells the name but not the cores."""

from __future__ import annotations

from pagedmlx.ops.launch import Platform

# Multiprocessors, each of which runs 4 threadgroups of the decode kernel.
_CUDA = (("B200", 148), ("H200", 132), ("H100", 132), ("A100", 108), ("L40", 142), ("4090", 128))
_CUDA_OTHERS = 100
# Cores of the larger of each chip's versions, which run about 12 SIMD-groups of it, so 3
# threadgroups: an estimate, for want of measurements.
_APPLE = (("Ultra", 80), ("Max", 40), ("Pro", 20))
_APPLE_OTHERS = 10


def threadgroups_at_once(platform: Platform, device_name: str) -> int:
    """Threadgroups of 4 SIMD-groups that the decode kernel should be cut into.

    Args:
        platform: Whose GPU.
        device_name: Its name, as MLX tells it.
    """
    if platform is Platform.CUDA:
        known, others, each = _CUDA, _CUDA_OTHERS, 4
    else:
        known, others, each = _APPLE, _APPLE_OTHERS, 3
    return each * next((cores for name, cores in known if name in device_name), others)
