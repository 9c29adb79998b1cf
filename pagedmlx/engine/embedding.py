"""EmbeddingSum: how the hidden states of a prompt become its embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagedmlx.core.pooling import EmbeddingSpec

Vector = npt.NDArray[np.float32]


class EmbeddingSum:
    """Adds up the hidden states that a prompt's embedding is made of, as they are computed.

    Args:
        spec: How the model's embeddings are made.
        num_dimensions: How many of the first ones are wanted.
        num_tokens: Of the prompt.
    """

    def __init__(self, spec: EmbeddingSpec, num_dimensions: int, num_tokens: int) -> None:
        self._is_normalized = spec.is_normalized
        self._num_dimensions = num_dimensions
        self._num_rows = len(spec.pooling.rows(num_tokens))
        self._sum: npt.NDArray[Any] = np.zeros(spec.num_dimensions, np.float32)

    def add(self, hidden: Vector) -> None:
        """Take in the sum of some rows' hidden states, (D,)."""
        self._sum = self._sum + hidden

    def whole(self) -> Vector:
        """The embedding, once all rows have come; not finite if one of them wasn't."""
        mean = self._sum[: self._num_dimensions] / np.float32(self._num_rows)
        if self._is_normalized:
            # In float64, where no square is too large.
            length = float(np.linalg.norm(mean.astype(np.float64)))
            mean = mean / np.float32(length or 1.0)
        return mean.astype(np.float32)
