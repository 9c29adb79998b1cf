"""SamplingParams: how one request's tokens are chosen and when it stops."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from pagedmlx.errors import InvalidRequestError

MAX_N = 64
MAX_STOP_STRINGS = 64
_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request; vLLM's names and meanings.

    Attributes:
        n: Number of candidate outputs for the prompt, 1 to 64.
        temperature: 0 is greedy; otherwise the divisor of the logits, 0 to 100.
        top_p: Smallest set of tokens whose probability reaches this, in (0, 1]; 1 is off.
        top_k: Keep only this many of the most likely tokens; 0 or -1 is off.
        min_p: Drop tokens less likely than this times the most likely one, in [0, 1]; 0 is off.
        seed: Makes the output reproducible; None draws a fresh one for each request.
        max_tokens: Most tokens to generate, at least 1; None means until the context is full.
        min_tokens: End-of-sequence, stop tokens and stop strings are ignored before this many.
        stop: Strings that end the output; the match itself is not part of the text.
        stop_token_ids: Token ids that end the output, beside the model's own.
        ignore_eos: Go on after the model's end-of-sequence tokens.
        skip_special_tokens: Leave special tokens out of the text.

    Raises:
        InvalidRequestError: A value is of the wrong type or out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, -1, None)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), _MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        for field in ("ignore_eos", "skip_special_tokens"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise InvalidRequestError(field, f"{value!r} is not true or false")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, whatever the other settings say."""
        return self.temperature == 0.0 or self.top_k == 1


def _check_int(field: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(field, f"{value!r} is not a whole number")
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(field, f"{value} must be {limits}")


def _check_number(
    field: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(field, f"{value!r} is not a number")
    too_low = value <= low if open_low else value < low
    if math.isnan(value) or too_low or value > high:
        low_text = f"above {low:g}" if open_low else f"at least {low:g}"
        raise InvalidRequestError(field, f"{value} must be {low_text} and at most {high:g}")


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, str | tuple | list):
        raise InvalidRequestError("stop", f"{value!r} is not a string or a list of strings")
    strings = (value,) if isinstance(value, str) else tuple(cast("Iterable[object]", value))
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stop", f"{len(strings)} strings, at most {MAX_STOP_STRINGS}")
    kept: dict[str, None] = {}
    for string in strings:
        if not isinstance(string, str):
            raise InvalidRequestError("stop", f"{string!r} is not a string")
        if string:
            kept[string] = None
    return tuple(kept)


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, tuple | list | set | frozenset):
        raise InvalidRequestError("stop_token_ids", f"{value!r} is not a list of token ids")
    tokens = tuple(cast("Iterable[int]", value))
    for token in tokens:
        _check_int("stop_token_ids", token, 0, None)
    return tokens
