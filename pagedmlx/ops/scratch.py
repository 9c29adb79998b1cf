"""Scratch: where K and V are gathered to, one place for all layers of a step."""

from __future__ import annotations

import mlx.core as mx

from pagedmlx.ops.launch import Launcher
from pagedmlx.ops.variants import GatherVariant
from pagedmlx.ops.worklist import bucket

ALIGNMENT = 8
"""Elements: what MLX's attention wants the beginning of an array to be a multiple of."""

_ROW = 1024
"""Elements that are bound to a launch; the kernel indexes past them."""


class Scratch:
    """K and V arrays for each kind of gather, as large as the largest step so far needs them.

    New arrays for each layer would be of new sizes in every step, which costs a GPU's driver more
    time than the attention takes, and there would be as many of them as the host runs ahead.

    Args:
        launcher: Runs the kernels.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._arrays: dict[GatherVariant, _Arrays] = {}

    def reserve(self, variant: GatherVariant, num_tokens: int) -> None:
        """Have room for so many tokens of all heads."""
        pool = variant.pool
        rows = bucket(-(-num_tokens * pool.num_kv_heads // _ROW)) * _ROW
        dims = (pool.k_head_dim, pool.v_head_dim)
        shapes = [(rows * dim // _ROW, _ROW) for dim in dims]
        known = self._arrays.get(variant)
        if known is not None and known.keys.shape[0] >= shapes[0][0]:
            return
        # Those that are too small go first, unless a step under way still needs them.
        self._arrays.pop(variant, None)
        del known
        dtype: mx.Dtype = getattr(mx, variant.dtype)
        self._arrays[variant] = _Arrays(self._launcher, *(mx.zeros(s, dtype) for s in shapes))

    def bound(self, variant: GatherVariant) -> list[mx.array]:
        """K and V as a kernel takes them that writes into them."""
        return self._arrays[variant].views

    def part(
        self, variant: GatherVariant, start: int, num_tokens: int
    ) -> tuple[mx.array, mx.array]:
        """What was gathered for some tokens; to be read only after that.

        Args:
            variant: Of the gather.
            start: Where they begin, a multiple of ``ALIGNMENT``, in tokens of all heads.
            num_tokens: How many.

        Returns:
            K (1, num_kv_heads, N, k_head_dim) and V likewise.
        """
        arrays, pool = self._arrays[variant], variant.pool
        parts = []
        for array, dim in ((arrays.keys, pool.k_head_dim), (arrays.values, pool.v_head_dim)):
            row = pool.num_kv_heads * dim
            flat = array.reshape(-1)[start * row : (start + num_tokens) * row]
            parts.append(flat.reshape(1, pool.num_kv_heads, num_tokens, dim))
        return parts[0], parts[1]

    def drop(self) -> None:
        """Give the memory back; a step under way keeps what it needs."""
        self._arrays.clear()


class _Arrays:
    """K and V, and what of them is bound to launches."""

    def __init__(self, launcher: Launcher, keys: mx.array, values: mx.array) -> None:
        mx.eval(keys, values)
        self.keys = keys
        self.values = values
        self.views = [launcher.view(keys), launcher.view(values)]
