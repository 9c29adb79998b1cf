"""Request: what one caller asked for, fixed when it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedmlx.core.pooling import Pooling
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.structured import Grammar


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with its settings; the scheduler makes ``params.n`` sequences of it.

    Attributes:
        request_id: Unique among the requests in flight.
        prompt_token_ids: At least one token.
        params: Sampling settings; ``max_tokens`` is already the number that applies.
        stop_token_ids: Every token that ends an output: the model's own unless ignored, and the
            request's.
        bad_words: Token sequences that no output may complete.
        seed: Source of the sampling keys; drawn by the engine when the request has none.
        priority: Larger is served first.
        cache_salt: Requests share cached blocks only with requests of the same salt.
        grammar: What each output follows; None is anything.
        pooling: The prompt's embedding is wanted, and no output; made of these hidden states.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    priority: int = 0
    cache_salt: str = ""
    grammar: Grammar | None = None
    pooling: Pooling | None = None

    @property
    def max_output_tokens(self) -> int:
        """Most tokens to generate."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens
