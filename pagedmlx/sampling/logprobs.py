"""Log probabilities of tokens under the model's own logits, and the most likely tokens there.

They are of the logits as the model gives them: no penalty, bias or temperature is in them, as
OpenAI and vLLM have it.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.core.sampling_params import MAX_LOGPROBS
from pagedmlx.core.step import TokenLogprobs

_CHUNK = 256


def score_tokens(logits: mx.array, tokens: mx.array, *, with_top: bool) -> mx.array:
    """Build the graph that tells how likely tokens were; nothing is evaluated.

    Args:
        logits: (N, V) of any floating type; computed with in float32.
        tokens: (N,) int32; a negative one is taken for 0.
        with_top: Find the most likely tokens too, K = min(``MAX_LOGPROBS``, V) of them.

    Returns:
        (N, 2) or (N, 2 + 2 K) int32 for ``read_scores``: rank, the bits of the log probability, the
        most likely tokens' ids, and the bits of their log probabilities.
    """
    return _scored_with_top(logits, tokens) if with_top else _scored(logits, tokens)


def read_scores(
    scores: npt.NDArray[np.int32], token_ids: Iterable[int], num_top: Iterable[int]
) -> list[TokenLogprobs]:
    """What ``score_tokens`` found, on the host.

    Args:
        scores: (N, 2 + 2 K); K is 0 if nobody wants the most likely tokens.
        token_ids: The N tokens.
        num_top: How many of the most likely tokens to keep for each.
    """
    middle = 2 + (scores.shape[1] - 2) // 2
    ranks = scores[:, 0].tolist()
    logprobs = np.ascontiguousarray(scores[:, 1]).view(np.float32).tolist()
    top_ids = scores[:, 2:middle].tolist()
    top_logprobs = np.ascontiguousarray(scores[:, middle:]).view(np.float32).tolist()
    return [
        TokenLogprobs(
            token_id=token,
            logprob=logprobs[row],
            rank=ranks[row],
            top=tuple(zip(top_ids[row][:count], top_logprobs[row][:count], strict=True)),
        )
        for row, (token, count) in enumerate(zip(token_ids, num_top, strict=True))
    ]


# Compiled, so that their constants are brought to the device once, and for few launches.
@mx.compile
def _scored(logits: mx.array, tokens: mx.array) -> mx.array:
    return _score(logits.astype(mx.float32), tokens)[0]


@mx.compile
def _scored_with_top(logits: mx.array, tokens: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    scores, total = _score(logits, tokens)
    ids = _most_likely(logits, min(MAX_LOGPROBS, logits.shape[1]))
    logprobs = mx.take_along_axis(logits, ids, axis=-1) - total
    return mx.concatenate([scores, ids, logprobs.view(mx.int32)], axis=-1)


def _score(logits: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, mx.maximum(tokens, 0)[:, None], axis=-1)
    rank = 1 + (logits > chosen).sum(axis=-1, keepdims=True).astype(mx.int32)
    return mx.concatenate([rank, (chosen - total).view(mx.int32)], axis=-1), total


def _most_likely(logits: mx.array, count: int) -> mx.array:
    """(N, count) int32 ids, the most likely first; of equals the smaller id first.

    Only chunks of the vocabulary with one of the ``count`` largest maxima can hold any of them, so
    that no whole row need be sorted. Relies on MLX's sort to leave equals in their order.
    """
    num_rows, vocabulary = logits.shape
    num_chunks = -(-vocabulary // _CHUNK)
    if num_chunks <= count:
        return mx.argsort(-logits, axis=-1)[:, :count].astype(mx.int32)
    padding = num_chunks * _CHUNK - vocabulary
    chunks = mx.pad(logits, [(0, 0), (0, padding)], constant_values=-mx.inf)
    chunks = chunks.reshape(num_rows, num_chunks, _CHUNK)
    best = mx.argsort(-chunks.max(axis=-1), axis=-1)[:, :count]
    best = mx.sort(best, axis=-1)
    found = mx.take_along_axis(chunks, best[:, :, None], axis=1).reshape(num_rows, -1)
    order = mx.argsort(-found, axis=-1)[:, :count]
    ids = mx.take_along_axis(best, order // _CHUNK, axis=-1) * _CHUNK + order % _CHUNK
    return mx.minimum(ids, vocabulary - 1).astype(mx.int32)
