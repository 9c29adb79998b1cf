"""Who attends a prefill chunk: ``prefill.metal``, or a gather and MLX's own attention."""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum

from pagedmlx.ops.launch import Platform
from pagedmlx.ops.prefill import PrefillVariant

PLAN_WORK = 100_000_000_000
"""Multiplications that the kernel does for one layer in a thirtieth of the time in which cuDNN
makes a plan: about 0.1 s on an H200, once for all layers."""

_MAX_SHAPES = 256
"""So many plans MLX keeps."""

_MAX_HEAD_DIM = 128
"""Of the kernel, to be fast on Metal, and of cuDNN."""


class PrefillPath(StrEnum):
    """Who attends prefill chunks."""

    AUTO = "auto"
    KERNEL = "kernel"
    GATHER = "gather"


class PrefillChooser:
    """Chooses for each chunk.

    On Metal the kernel is taken where it is expected to be faster: for types that the matrix units
    are fed from 16 bits, and head sizes that fit the registers well.

    On CUDA MLX's attention has larger matrices, and is several times faster. But it is cuDNN's,
    which makes a plan for each shape that it meets, and chunks come in ever new shapes. So a shape
    goes by the kernel until that has cost as much as a plan: whatever comes, the time is at most
    about twice that of the better choice.

    Args:
        path: Whom to take.
        platform: Whose GPU.
    """

    def __init__(self, path: PrefillPath, platform: Platform) -> None:
        self._path = path
        self._platform = platform
        self._work: OrderedDict[tuple[PrefillVariant, int, int, bool], int] = OrderedDict()

    def takes_kernel(
        self, variant: PrefillVariant, num_rows: int, num_tokens: int, is_masked: bool
    ) -> bool:
        """Whether a chunk goes through the kernel; on CUDA an answer counts as carried out.

        Args:
            variant: The kernel.
            num_rows: Rows of the chunk.
            num_tokens: Tokens that any of them sees.
            is_masked: Whether a row sees fewer of them than causality allows.
        """
        if self._path is PrefillPath.GATHER or not variant.is_supported:
            return False
        if self._path is PrefillPath.KERNEL:
            return True
        head_dim = max(variant.pool.k_head_dim, variant.pool.v_head_dim)
        is_small = (
            "float32" not in (variant.dtype, variant.pool.dtype) and head_dim <= _MAX_HEAD_DIM
        )
        if self._platform is Platform.METAL:
            return is_small
        # Whatever else there is needs no plans.
        if not is_small or variant.softcap is not None:
            return False
        shape = (variant, num_rows, num_tokens, is_masked)
        spent = self._work.pop(shape, 0)
        self._work[shape] = spent + _work(variant, num_rows, num_tokens)
        if len(self._work) > _MAX_SHAPES:
            self._work.popitem(last=False)
        return spent < PLAN_WORK


def _work(variant: PrefillVariant, num_rows: int, num_tokens: int) -> int:
    """Multiplications of one layer."""
    pool = variant.pool
    seen = num_tokens - num_rows // 2
    heads = pool.num_kv_heads * variant.factor
    return num_rows * seen * heads * (pool.k_head_dim + pool.v_head_dim)
