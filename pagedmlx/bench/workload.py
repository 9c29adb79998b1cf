"""Workloads: how long prompts and outputs are, what they say and when they come; all seeded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work night point "
    "home water room mother area money story fact month lot right study book eye job word business "
    "issue side kind head house service friend father power hour game line end member law car city"
)
"""Common ones: with most tokenizers each is one token, with the space before it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a benchmark asks for.

    Attributes:
        num_requests: How many requests.
        input_len: Tokens of a prompt, on average.
        output_len: Tokens of an output, on average.
        spread: 0 makes all lengths equal; else they are lognormal with this sigma.
        seed: Of lengths, texts and arrivals.
    """

    num_requests: int
    input_len: int
    output_len: int
    spread: float = 0.0
    seed: int = 0

    def generator(self) -> np.random.Generator:
        """Where all that is random comes from; equal for equal workloads."""
        return np.random.default_rng(self.seed)

    def lengths(self, generator: np.random.Generator) -> list[tuple[int, int]]:
        """Tokens of prompt and output of each request."""
        inputs = _lengths(generator, self.input_len, self.num_requests, self.spread)
        outputs = _lengths(generator, self.output_len, self.num_requests, self.spread)
        return list(zip(inputs, outputs, strict=True))


def _lengths(generator: np.random.Generator, mean: int, count: int, spread: float) -> list[int]:
    # A lognormal's mean is exp(mu + sigma^2 / 2); eight times the mean is a text of another kind.
    scale = mean * np.exp(generator.normal(-(spread**2) / 2, spread, count))
    return np.clip(np.rint(scale), 1, 8 * mean).astype(int).tolist()


def arrivals(generator: np.random.Generator, rate: float, count: int) -> list[float]:
    """Seconds at which requests come: a Poisson process, or all at once at an infinite rate."""
    if rate == float("inf"):
        return [0.0] * count
    times = np.cumsum(generator.exponential(1 / rate, count))
    return (times - times[0]).tolist()


def token_prompt(generator: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    """Token ids that begin like no other prompt's."""
    # The first ids are often special.
    return generator.integers(min(100, vocab_size // 2), vocab_size, count).tolist()


def text_prompt(generator: np.random.Generator, count: int) -> str:
    """About so many tokens of text, for endpoints whose tokenizer nobody here knows."""
    return " ".join(generator.choice(_WORDS.split(), count).tolist())
