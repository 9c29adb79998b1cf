"""Sampler: one token for each row of logits, every row with its own settings, in one MLX graph.

It owns the order of the filters and the random numbers. What comes before them is in
``processors``; stopping and text belong to others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import unpack

import mlx.core as mx

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.sequence import Sequence as TextSequence
from pagedmlx.sampling.greedy import most_likely, only_valid
from pagedmlx.sampling.rows import put_rows, take_rows

# Divisors below this are raised to it; they are greedy already, and float32 must stay finite.
_MIN_TEMPERATURE = 1e-9
# Above any share of the mass, so that every token counts as below it.
_TOP_P_OFF = 2.0
# Half of the step between the smallest random numbers: the exponential noise never reaches 0.
_MIN_NOISE = 2.0**-33


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What decides the token of one row.

    Attributes:
        params: The request's settings.
        seed: The request's seed.
        index: Which of the request's ``n`` outputs the row belongs to.
        position: Position that the new token will have in its sequence.
        sequence: Whose text it goes on; only the processors look at that.
    """

    params: SamplingParams
    seed: int
    index: int
    position: int
    sequence: TextSequence | None = None


def sampling_key(seed: int, index: int, position: int) -> tuple[int, int]:
    """Key of MLX's random numbers for one token: two whole numbers in [0, 2**32).

    It depends on nothing else, so neither the row, nor the neighbours, nor a preemption changes
    what a seed gives.
    """
    digest = blake2b(f"{seed},{index},{position}".encode(), digest_size=8).digest()
    first, second = unpack("<2I", digest)
    return first, second


@dataclass(frozen=True, slots=True)
class Sampler:
    """Chooses tokens: the most likely one, or a random one of those that the filters keep.

    The filters apply in this order:

    1. temperature divides the logits;
    2. top_k keeps the k most likely tokens;
    3. top_p keeps, of those, the fewest most likely whose share of their mass reaches it;
    4. min_p keeps, of those, the tokens at least min_p times as likely as the most likely one.

    Of equally likely tokens, top_k and top_p keep those with the smaller ids. A token is drawn
    with the Gumbel-max trick (Maddison et al., "A* Sampling", 2014, section 2).

    Attributes:
        narrow_width: Rows whose top_k is at most this sort only so many logits. It is the same
            for all of them, so that a neighbour's top_k doesn't change how a row is added up.
        find_most_likely: Chooses where all rows want the most likely token.
    """

    narrow_width: int = 256
    find_most_likely: Callable[[mx.array], mx.array] = most_likely

    def sample(self, logits: mx.array, rows: Sequence[SampleRow]) -> mx.array:
        """Build the graph that chooses a token for each row; nothing is evaluated.

        Args:
            logits: (R, V) of any floating type; computed with in float32.
            rows: The R rows' settings.

        Returns:
            (R,) int32 tokens; ``INVALID_TOKEN`` for a row with a NaN or without a finite maximum.
        """
        assert logits.ndim == 2
        assert len(rows) == logits.shape[0]
        if not rows:
            return mx.zeros((0,), mx.int32)
        drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
        if not drawn:
            return self.find_most_likely(logits)
        logits = logits.astype(mx.float32)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        draws = self._draw(take_rows(logits, drawn), [rows[index] for index in drawn])
        return only_valid(logits, put_rows(tokens, drawn, draws))

    def _draw(self, logits: mx.array, rows: Sequence[SampleRow]) -> mx.array:
        vocabulary = logits.shape[1]
        temperature = _column([max(row.params.temperature, _MIN_TEMPERATURE) for row in rows])
        # The most likely token is at 0 from here on.
        scores = (logits - logits.max(axis=-1, keepdims=True)) / temperature

        narrow: list[int] = []
        wide: list[int] = []
        for index, row in enumerate(rows):
            if 0 < row.params.top_k < vocabulary:
                is_narrow = row.params.top_k <= self.narrow_width < vocabulary
                (narrow if is_narrow else wide).append(index)
            elif row.params.top_p < 1.0:
                wide.append(index)
        for members, width in ((narrow, self.narrow_width), (wide, vocabulary)):
            if members:
                params = [rows[index].params for index in members]
                kept = _keep_top(take_rows(scores, members), params, width)
                scores = put_rows(scores, members, kept)

        if any(row.params.min_p > 0.0 for row in rows):
            limit = _column([_log(row.params.min_p) for row in rows])
            scores = mx.where(scores < limit, -mx.inf, scores)

        return mx.argmax(scores + _gumbel(rows, vocabulary), axis=-1).astype(mx.int32)


def _keep_top(scores: mx.array, params: Sequence[SamplingParams], width: int) -> mx.array:
    """Put all but the tokens that top_k and top_p keep to -inf; ``width`` is how many may stay."""
    vocabulary = scores.shape[1]
    top_k = _column(
        [each.top_k if 0 < each.top_k < vocabulary else vocabulary for each in params], mx.int32
    )
    top_p = _column([each.top_p if each.top_p < 1.0 else _TOP_P_OFF for each in params])

    falling = -scores
    if width < vocabulary:
        falling = mx.partition(falling, width - 1, axis=-1)[:, :width]
    best = -mx.sort(falling, axis=-1)
    mass = mx.where(mx.arange(width) < top_k, mx.exp(best), 0.0)
    up_to = mx.cumsum(mass, axis=-1)
    before = mx.cumsum(mass, axis=-1, inclusive=False)
    within = (before < top_p * up_to[:, -1:]) & (mx.arange(width) < top_k)
    num_kept = mx.maximum(within.sum(axis=-1, keepdims=True), 1)

    # Only values come out of the sort, so which of equals stay doesn't depend on its algorithm.
    last = mx.take_along_axis(best, num_kept - 1, axis=-1)
    above = scores > last
    tied = scores == last
    room = num_kept - above.sum(axis=-1, keepdims=True)
    kept = above | (tied & (mx.cumsum(tied.astype(mx.int32), axis=-1) <= room))
    return mx.where(kept, scores, -mx.inf)


def _gumbel(rows: Sequence[SampleRow], vocabulary: int) -> mx.array:
    """(R, V) Gumbel noise, always finite, each row from its own key."""
    keys = mx.array(
        [sampling_key(row.seed, row.index, row.position) for row in rows], dtype=mx.uint32
    )
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(vocabulary,), key=key))(keys)
    # Uniform numbers are finest near 0: there they decide how fair rare tokens are treated.
    return -mx.log(mx.maximum(-mx.log1p(-uniform), _MIN_NOISE))


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf


def _column(values: list[float] | list[int], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(values, dtype=dtype)[:, None]
