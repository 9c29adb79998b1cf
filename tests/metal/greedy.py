"""Cases of ``most_likely.metal``, and their answer by numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product

import mlx.core as mx
import numpy as np

from pagedmlx.core.step import INVALID_TOKEN
from pagedmlx.ops.launch import Launcher
from pagedmlx.ops.most_likely import MostLikely
from tests.support.attention import TOLERANCES, to_numpy

SIZES = (1, 3, 4, 5, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025, 4096, 32000)
"""Around the borders of vectors, of SIMD-groups and of what a thread loads at once."""


@dataclass(frozen=True)
class GreedyCase:
    """Rows of logits of one type and size, among them all that may be special about one."""

    dtype: str
    num_logits: int

    def __str__(self) -> str:
        return f"{self.dtype}-{self.num_logits}"

    def deviation(self, launcher: Launcher) -> float:
        """0 if all tokens are numpy's, else infinite."""
        logits = self.logits
        found = np.array(MostLikely(launcher)(logits))
        return 0.0 if np.array_equal(found, expected_tokens(to_numpy(logits))) else np.inf

    @property
    def logits(self) -> mx.array:
        """(R, V)."""
        rows = np.stack(list(special_rows(self.num_logits))).astype(np.float32)
        return mx.array(rows).astype(getattr(mx, self.dtype))


def expected_tokens(logits: np.ndarray) -> np.ndarray:
    """(R,) first places of the largest elements, which are NaN where there is any."""
    highest = logits.max(axis=1)
    return np.where(np.isfinite(highest), logits.argmax(axis=1), INVALID_TOKEN)


def special_rows(num_logits: int) -> Iterator[np.ndarray]:
    """Rows whose largest logit, equal ones, NaN and infinities are at telling places."""
    rng = np.random.default_rng(num_logits)
    last, middle = num_logits - 1, num_logits // 2
    places = sorted({min(place, last) for place in (0, 5, 130, middle, last - 1, last)} - {-1})

    def row(values: Mapping[int, float]) -> np.ndarray:
        logits = rng.standard_normal(num_logits)
        logits[[*values]] = [*values.values()]
        return logits

    for place in places:
        yield row({place: 9.0})
        yield row({place: np.nan})
        yield row({place: np.inf})
        yield row({middle: np.inf, place: np.nan})
    # Equal ones: in one thread, in several, everywhere; zeros are equal whatever their sign.
    for pair in pairwise(places):
        yield row(dict.fromkeys(pair, 9.0))
    yield np.zeros(num_logits)
    yield np.where(np.arange(num_logits) < middle, -0.0, 0.0)
    # Most tokens are forbidden, or all.
    for value in (-3e4, np.nan, -np.inf):
        yield np.where(np.arange(num_logits) == last, value, -np.inf)


def every_case() -> list[GreedyCase]:
    """All types and sizes."""
    return [GreedyCase(*values) for values in product(TOLERANCES, SIZES)]
