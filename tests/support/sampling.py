"""What sampling settings ask for, written plainly in numpy, one row at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from pagedmlx.core.request import Request
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.sequence import Sequence as TextSequence


def make_sequence(
    seq_id: int,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Iterable[int] = (),
    *,
    stop_token_ids: Iterable[int] = (),
    bad_words: Iterable[Sequence[int]] = (),
    request_id: str | None = None,
    index: int = 0,
    seed: int = 1,
) -> TextSequence:
    words = tuple(tuple(word) for word in bad_words)
    if words:
        params = replace(params, bad_words=tuple(map(str, words)))
    request = Request(
        request_id=str(seq_id) if request_id is None else request_id,
        prompt_token_ids=tuple(prompt),
        params=params,
        stop_token_ids=frozenset(stop_token_ids),
        bad_words=words,
        seed=seed,
    )
    return TextSequence(seq_id, request, index, [*prompt, *output], ())


def changed_logits(logits: np.ndarray, request: Request, output: Sequence[int]) -> np.ndarray:
    """One row of logits after all processors, in vLLM's order, in float32."""
    params = request.params
    logits = logits.astype(np.float32)
    if params.allowed_token_ids is not None:
        for token in range(len(logits)):
            if token not in params.allowed_token_ids:
                logits[token] = -np.inf
    for word in request.bad_words:
        before = len(word) - 1
        if before <= len(output) and tuple(output[len(output) - before :]) == tuple(word[:-1]):
            logits[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        for token in request.stop_token_ids:
            logits[token] = -np.inf
    for token, bias in params.logit_bias:
        logits[token] += np.float32(bias)
    for token in {*request.prompt_token_ids, *output}:
        if logits[token] > 0:
            logits[token] /= np.float32(params.repetition_penalty)
        else:
            logits[token] *= np.float32(params.repetition_penalty)
    for token in set(output):
        logits[token] -= np.float32(params.frequency_penalty) * output.count(token)
        logits[token] -= np.float32(params.presence_penalty)
    return logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def most_likely(logits: np.ndarray, count: int) -> list[int]:
    """The likeliest tokens of one row; of equals the smaller id first."""
    return np.argsort(-logits.astype(np.float64), kind="stable")[:count].tolist()
