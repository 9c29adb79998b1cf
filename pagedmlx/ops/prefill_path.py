"""Who attends a prefill chunk: ``prefill.metal``, whole or in parts, or MLX's own attention."""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum

from pagedmlx.ops.launch import Platform
from pagedmlx.ops.prefill import PrefillVariant

PLAN_WORK = 250_000_000_000
"""Multiplications that the kernel does for one layer in a thirtieth of the time in which cuDNN
makes a plan: about 0.1 s on an H200, once for all layers."""

_MAX_SHAPES = 256
"""So many plans MLX keeps."""

_MAX_HEAD_DIM = 128
"""Of the kernel, to be fast on Metal, and of cuDNN."""


_MAX_ROWS = 256
_MIN_BEFORE = 1024
"""Short chunks, and long contexts."""


class PrefillPath(StrEnum):
    """Who attends prefill chunks.

    ``kernel`` is ``prefill.metal``; ``split`` is the same with each row's tokens cut in parts;
    ``gather`` is MLX's own attention on gathered K and V.
    """

    AUTO = "auto"
    KERNEL = "kernel"
    GATHER = "gather"
    SPLIT = "split"


class PrefillChooser:
    """Chooses for each chunk.

    A short chunk behind a long context has too few tiles to fill the GPU, and each is long: there
    the context is cut across, as in decoding.

    On Metal the kernel is taken where it is expected to be faster: for types that the matrix units
    are fed from 16 bits, and head sizes that fit the registers well.

    On CUDA MLX's attention has larger matrices, and is several times faster. But it is cuDNN's,
    which makes a plan for each shape that it meets, and chunks come in ever new shapes. So a shape
    goes by the kernel until that would have cost as much as a plan: whatever comes, the time is at
    most about twice that of the better choice.

    Args:
        path: Whom to take, where it can.
        platform: Whose GPU.
        wave: Threadgroups that it runs at once.

    Attributes:
        may_split: Whether contexts are cut across where nothing is forced.
    """

    def __init__(self, path: PrefillPath, platform: Platform, wave: int) -> None:
        self.may_split = True
        self._path = path
        self._platform = platform
        self._wave = wave
        self._work: OrderedDict[tuple[PrefillVariant, int, int, bool], int] = OrderedDict()

    def choose(
        self, variant: PrefillVariant, num_rows: int, num_tokens: int, is_masked: bool
    ) -> PrefillPath:
        """Who attends a chunk; on CUDA an answer counts as carried out.

        Args:
            variant: The kernel.
            num_rows: Rows of the chunk.
            num_tokens: Tokens that any of them sees.
            is_masked: Whether a row sees fewer of them than causality allows.
        """
        if self._path is PrefillPath.GATHER or not variant.is_supported:
            return PrefillPath.GATHER
        if self.splits(variant, num_rows, num_tokens, is_masked):
            return PrefillPath.SPLIT
        if self._path is not PrefillPath.AUTO:
            return PrefillPath.KERNEL
        on_cuda = self._platform is Platform.CUDA
        if not _is_small(variant) or (on_cuda and not self._needs_plan(variant)):
            return PrefillPath.GATHER
        if not self._needs_plan(variant):
            return PrefillPath.KERNEL
        shape = (variant, num_rows, num_tokens, is_masked)
        spent = self._work.pop(shape, 0) + _work(variant, num_rows, num_tokens)
        self._work[shape] = spent
        if len(self._work) > _MAX_SHAPES:
            self._work.popitem(last=False)
        return PrefillPath.KERNEL if spent < PLAN_WORK else PrefillPath.GATHER

    def splits(
        self, variant: PrefillVariant, num_rows: int, num_tokens: int, is_masked: bool
    ) -> bool:
        """Whether ``choose`` would cut the context of a chunk across."""
        if not variant.is_supported or is_masked:
            return False
        if self._path is not PrefillPath.AUTO:
            return self._path is PrefillPath.SPLIT
        is_short = num_rows <= _MAX_ROWS and num_tokens - num_rows >= _MIN_BEFORE
        num_tiles = -(-num_rows * variant.factor // variant.vectors)
        is_small = 2 * num_tiles * variant.pool.num_kv_heads <= self._wave
        return self.may_split and is_short and is_small

    def keeps_scores(self, variant: PrefillVariant) -> bool:
        """Whether chunks may go by an attention that keeps all of their scores at once."""
        if self._path is PrefillPath.GATHER or not variant.is_supported:
            return True
        if self._path is not PrefillPath.AUTO:
            return False
        on_cuda = self._platform is Platform.CUDA
        return not (self._needs_plan(variant) if on_cuda else _is_small(variant))

    def can_be_planned(self, variant: PrefillVariant) -> bool:
        """Whether chunks may go by MLX's attention, for which it needs a plan of their shape."""
        is_open = self._path is PrefillPath.AUTO and variant.is_supported
        return is_open and self._needs_plan(variant)

    def note_plan(self, variant: PrefillVariant, num_rows: int, num_tokens: int) -> None:
        """Chunks of this shape, no row of which sees less than causality allows, have a plan."""
        self._work[variant, num_rows, num_tokens, False] = PLAN_WORK

    def _needs_plan(self, variant: PrefillVariant) -> bool:
        on_cuda = self._platform is Platform.CUDA
        return on_cuda and _is_small(variant) and variant.softcap is None


def _is_small(variant: PrefillVariant) -> bool:
    """Whether it is what cuDNN takes, and what the kernel is fast for on Metal."""
    head_dim = max(variant.pool.k_head_dim, variant.pool.v_head_dim)
    return "float32" not in (variant.dtype, variant.pool.dtype) and head_dim <= _MAX_HEAD_DIM


def _work(variant: PrefillVariant, num_rows: int, num_tokens: int) -> int:
    """Multiplications of one layer."""
    pool = variant.pool
    seen = num_tokens - num_rows // 2
    heads = pool.num_kv_heads * variant.factor
    return num_rows * seen * heads * (pool.k_head_dim + pool.v_head_dim)
