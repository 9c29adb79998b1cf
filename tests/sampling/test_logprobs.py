"""Log probabilities are those of the logits, and the most likely tokens come in their order."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from pagedmlx.core.step import TokenLogprobs
from pagedmlx.sampling.logprobs import read_scores, score_tokens
from tests.support.sampling import log_softmax, most_likely


def score(logits: mx.array, tokens: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    scores = score_tokens(logits, mx.array(tokens, mx.int32), with_top=any(num_top))
    return read_scores(np.array(scores), tokens, num_top)


def check(found: TokenLogprobs, logits: np.ndarray, token: int, num_top: int) -> None:
    expected = log_softmax(logits)
    assert found.token_id == token
    assert found.logprob == pytest.approx(expected[token], abs=1e-4)
    assert found.logprob <= 1e-6
    assert found.rank == 1 + int((logits > logits[token]).sum())
    top = most_likely(logits, num_top)
    assert [each for each, _ in found.top] == top
    assert [value for _, value in found.top] == pytest.approx(expected[top], abs=1e-4)


@pytest.mark.parametrize("vocabulary", [1, 3, 19, 20, 21, 255, 256, 257, 5120, 5121, 9000])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_scores_equal_float64_for_any_vocabulary(vocabulary: int, dtype: mx.Dtype):
    rng = np.random.default_rng(vocabulary)
    logits = mx.array(rng.normal(size=(5, vocabulary)).astype(np.float32) * 4).astype(dtype)
    host = np.array(logits.astype(mx.float32))
    tokens = rng.integers(0, vocabulary, 5).tolist()
    num_top = [0, 1, min(5, vocabulary), min(20, vocabulary), 0]
    for row, found in enumerate(score(logits, tokens, num_top)):
        check(found, host[row], tokens[row], num_top[row])


@given(
    logits=st_numpy.arrays(
        np.float32, (3, 600), elements=st.sampled_from([-2.0, 0.0, 1.0]), fill=st.just(0.0)
    ),
    num_top=st.integers(0, 20),
)
def test_equal_tokens_come_by_their_ids(logits: np.ndarray, num_top: int):
    for row, found in enumerate(score(mx.array(logits), [7, 300, 599], [num_top] * 3)):
        check(found, logits[row], (7, 300, 599)[row], num_top)


def test_more_equal_tokens_than_a_chunk_holds_come_by_their_ids():
    for vocabulary in (700, 30000):
        logits = np.zeros((2, vocabulary), np.float32)
        logits[1, vocabulary // 2 :] = 1.0
        for row, found in enumerate(score(mx.array(logits), [0, 0], [20, 20])):
            check(found, logits[row], 0, 20)


def test_neighbours_and_what_they_want_never_change_a_rows_scores():
    rng = np.random.default_rng(1)
    logits = mx.array(rng.normal(size=(6, 3000)).astype(np.float32))
    tokens, num_top = rng.integers(0, 3000, 6).tolist(), [0, 3, 20, 0, 1, 20]
    together = score(logits, tokens, num_top)
    alone = [score(logits[row : row + 1], [tokens[row]], [num_top[row]])[0] for row in range(6)]
    assert together == alone


def test_impossible_tokens_are_at_minus_infinity():
    logits = np.full((1, 2000), -np.inf, np.float32)
    logits[0, 1500] = 3.0
    (found,) = score(mx.array(logits), [4], [2])
    assert (found.logprob, found.rank) == (-np.inf, 2)
    assert found.top == ((1500, 0.0), (0, -np.inf))
