"""Where the K and V lie that the rows of a batch see, for model code that reads them itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import BatchArrays


@dataclass(frozen=True, slots=True)
class Context:
    """What S sequences of L rows each see of one KV group.

    Attributes:
        slots: (S, N) int64; what is past a sequence's end names its last token's slot, so that no
            slot is read that holds no live token: a masked NaN would still poison the row.
        mask: (S, 1, L, N) booleans, or with one axis of 1 more, or (L, N) for one sequence; false
            for later tokens, for those that the window has passed and for what is past the end.
            None where single rows see it all.
    """

    slots: mx.array
    mask: mx.array | None


def find_context(
    host: BatchArrays,
    group: int,
    window: int | None,
    block_size: int,
    mask_window: int | None = None,
    mask_ndim: int = 4,
) -> Context:
    """Find the slots that the rows of a batch see, in the order of their tokens.

    Args:
        host: Sequences with equally many rows.
        group: The KV group.
        window: Tokens that the group's layers keep for a query; None is all.
        block_size: Tokens in one block.
        mask_window: Tokens that a query sees, if fewer.
        mask_ndim: 4, or 5 for scores with an axis for the query heads of one KV head.
    """
    ends = host.context_lens
    num_seqs = len(ends)
    positions = host.positions.reshape(num_seqs, -1)
    lows = np.zeros_like(ends)
    if window is not None:
        lows = np.maximum(positions[:, 0] - window + 1, 0)
    tokens = lows[:, None] + np.arange((ends - lows).max(), dtype=np.int32)
    distance = positions[:, :, None] - tokens[:, None, :]
    seen = distance >= 0
    for limit in (window, mask_window):
        if limit is not None:
            seen &= distance < limit
    tokens = np.minimum(tokens, ends[:, None] - 1)
    blocks = np.take_along_axis(host.groups[group].block_tables, tokens // block_size, axis=1)
    slots = blocks.astype(np.int64) * block_size + tokens % block_size
    mask = None
    if positions.shape[1] > 1 or not seen.all():
        axes = (1,) * (mask_ndim - 3)
        shown: Any = seen[0] if num_seqs == 1 else seen.reshape(num_seqs, *axes, *seen.shape[1:])
        mask = mx.array(shown)
    return Context(mx.array(slots), mask)
