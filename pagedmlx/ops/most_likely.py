"""MostLikely: the kernel that finds the most likely token of each row, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from pagedmlx.core.step import INVALID_TOKEN
from pagedmlx.ops.in_place import dtype_name
from pagedmlx.ops.launch import MIN_ELEMENTS, SIMD_WIDTH, Kernel, Launch, Launcher
from pagedmlx.ops.variants import TYPE_NAMES, make_kernel

_MAX_SIMDGROUPS = 32
_VECTOR = 4


@dataclass(frozen=True)
class MostLikelyVariant:
    """``most_likely.metal`` for logits of one type.

    Attributes:
        dtype: Their type by name.
        num_simdgroups: SIMD-groups that share a row.
    """

    dtype: str
    num_simdgroups: int

    @cached_property
    def kernel(self) -> Kernel:
        """The text with these constants."""
        return make_kernel(
            "most_likely",
            {
                "T": TYPE_NAMES[self.dtype],
                "SIMDGROUPS": self.num_simdgroups,
                "INVALID": INVALID_TOKEN,
            },
            ("logits",),
            ("tokens",),
            threadgroup_bytes=8 * self.num_simdgroups,
        )


class MostLikely:
    """Finds the most likely tokens by ``most_likely.metal``.

    Args:
        launcher: Runs it.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launch = launcher
        self._variants: dict[tuple[mx.Dtype, int], MostLikelyVariant] = {}

    def __call__(self, logits: mx.array) -> mx.array:
        """Build the graph; nothing is evaluated.

        Args:
            logits: (R, V) of any floating type; R is at least 1.

        Returns:
            (R,) int32: the smallest index of the largest logit; ``INVALID_TOKEN`` for a row with a
            NaN or without a finite maximum.
        """
        if logits.size < MIN_ELEMENTS:
            logits = mx.pad(logits, [(0, 0), (0, MIN_ELEMENTS)], constant_values=-mx.inf)
        num_rows, num_logits = logits.shape
        variant = self._variant(logits.dtype, num_logits)
        num_threads = SIMD_WIDTH * variant.num_simdgroups
        return self._launch(
            Launch(
                variant.kernel,
                [logits],
                num_rows * num_threads,
                num_threads,
                [(num_rows,)],
                [mx.int32],
            )
        )[0]

    def _variant(self, dtype: mx.Dtype, num_logits: int) -> MostLikelyVariant:
        variant = self._variants.get((dtype, num_logits))
        if variant is None:
            num_simdgroups = min(-(-num_logits // (SIMD_WIDTH * _VECTOR)), _MAX_SIMDGROUPS)
            variant = MostLikelyVariant(dtype_name(dtype), num_simdgroups)
            self._variants[dtype, num_logits] = variant
        return variant
