"""The most likely token of each row: by MLX, or by the kernel where it gives the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx
import numpy as np

from pagedmlx.core.step import INVALID_TOKEN
from pagedmlx.errors import KernelError
from pagedmlx.ops.launch import Launcher
from pagedmlx.ops.most_likely import MostLikely


# Compiled, so that their constants are brought to the device once, and for few launches.
@mx.compile
def most_likely(logits: mx.array) -> mx.array:
    """(R,) int32 tokens for (R, V) logits, by MLX; see ``MostLikely``."""
    return only_valid(logits, mx.argmax(logits, axis=-1).astype(mx.int32))


@mx.compile
def only_valid(logits: mx.array, tokens: mx.array) -> mx.array:
    """``INVALID_TOKEN`` in place of the tokens of rows with a NaN or without a finite maximum."""
    logits = logits.astype(mx.float32)
    invalid = mx.isnan(logits).any(axis=-1) | ~mx.isfinite(logits.max(axis=-1))
    return mx.where(invalid, INVALID_TOKEN, tokens)


def by_kernel(launcher: Launcher, dtypes: Iterable[str], num_logits: int) -> MostLikely:
    """The kernel, compiled for logits of these types and compared with MLX.

    Args:
        launcher: Runs it.
        dtypes: Types by name.
        num_logits: V.

    Raises:
        KernelError: It can't be compiled, or gives other tokens.
    """
    found = MostLikely(launcher)
    for dtype in dict.fromkeys(dtypes):
        if count := num_different(found, dtype, num_logits):
            raise KernelError(f"it finds other tokens than MLX in {count} rows of {dtype}")
    return found


def num_different(find: Callable[[mx.array], mx.array], dtype: str, num_logits: int) -> int:
    """In how many rows, special ones among them, MLX finds another token."""
    rows = np.random.default_rng(0).standard_normal((8, num_logits), np.float32)
    middle = num_logits // 2
    rows[0, 0] = 9
    rows[1, -1] = 9
    rows[2, middle::7] = 9
    rows[3, middle] = np.nan
    rows[4, middle] = np.inf
    rows[5:] = -np.inf
    rows[6, middle:] = -9
    rows[7, -1] = np.nan
    logits = mx.array(rows).astype(getattr(mx, dtype))
    different = find(logits) != most_likely(logits)
    return int(np.count_nonzero(np.array(different)))
