"""SamplingParams: how one request's tokens are chosen and when it stops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from pagedmlx.core.structured import StructuredOutputs
from pagedmlx.errors import InvalidRequestError

MAX_N = 64
MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
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
        min_tokens: Before this many, end-of-sequence and stop tokens can't be chosen and stop
            strings are ignored.
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens that
            are in the prompt or the output, 1e-9 to 100; 1 is off.
        presence_penalty: Taken from the logits of tokens that are in the output, -2 to 2.
        frequency_penalty: The same for each time that they are in it, -2 to 2.
        logit_bias: Added to the logits of single tokens: pairs of a token id and a number from -100
            to 100. A mapping is taken too, its keys may be strings.
        allowed_token_ids: Only these can be chosen; None is all.
        bad_words: Words that are never completed: as tokenized both alone and after a space.
        logprobs: For each output token, its log probability and those of this many of the most
            likely tokens, 0 to 20; None is off. They are the model's own: of its logits as they
            are, before anything above changes them.
        prompt_logprobs: The same for the prompt's tokens. Their cached blocks are not used then.
        stop: Strings that end the output; the match itself is not part of the text.
        stop_token_ids: Token ids that end the output, beside the model's own.
        include_stop_str_in_output: Leave what ended the output in the text, string or token.
        ignore_eos: Go on after the model's end-of-sequence tokens.
        skip_special_tokens: Leave special tokens out of the text.
        structured: A grammar that the output follows. The model's end is chosen only where the
            grammar is satisfied, and the output ends where it allows nothing more, whatever
            ``ignore_eos`` and ``min_tokens`` say. Stop strings and tokens end it in the middle.

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
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured: StructuredOutputs | None = None

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
        # Divided by much less, a logit is no float32 any more.
        _check_number("repetition_penalty", self.repetition_penalty, 1e-9, 100.0)
        for field in ("presence_penalty", "frequency_penalty"):
            _check_number(field, getattr(self, field), -2.0, 2.0)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _check_int(field, getattr(self, field), 0, MAX_LOGPROBS)
        for field, value in (
            ("logit_bias", _biases(self.logit_bias)),
            ("allowed_token_ids", _allowed(self.allowed_token_ids)),
            ("bad_words", _bad_words(self.bad_words)),
            ("stop", _stop_strings(self.stop)),
            ("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)),
        ):
            object.__setattr__(self, field, value)
        for field in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidRequestError(field, f"{getattr(self, field)!r} is not true or false")
        if not isinstance(cast("object", self.structured), StructuredOutputs | None):
            raise InvalidRequestError(
                "structured", f"{type(self.structured).__name__} is not a StructuredOutputs"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, whatever the other settings say."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


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
    # Last, since a whole number can be too large for it.
    if too_low or value > high or math.isnan(value):
        low_text = f"above {low:g}" if open_low else f"at least {low:g}"
        raise InvalidRequestError(field, f"{value} must be {low_text} and at most {high:g}")


def _stop_strings(value: object) -> tuple[str, ...]:
    # Empty ones would match everywhere, and are passed over.
    return tuple(dict.fromkeys(filter(None, _strings("stop", value, MAX_STOP_STRINGS))))


def _bad_words(value: object) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(_strings("bad_words", value, MAX_BAD_WORDS)))
    if not all(word.strip() for word in words):
        raise InvalidRequestError("bad_words", "has an empty word")
    return words


def _strings(field: str, value: object, most: int) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, str | tuple | list):
        raise InvalidRequestError(field, f"{value!r} is not a string or a list of strings")
    strings = (value,) if isinstance(value, str) else tuple(cast("Iterable[object]", value))
    if len(strings) > most:
        raise InvalidRequestError(field, f"{len(strings)} strings, at most {most}")
    for string in strings:
        if not isinstance(string, str):
            raise InvalidRequestError(field, f"{string!r} is not a string")
    return cast("tuple[str, ...]", strings)


def _token_ids(field: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, tuple | list | set | frozenset):
        raise InvalidRequestError(field, f"{value!r} is not a list of token ids")
    tokens = tuple(cast("Iterable[int]", value))
    for token in tokens:
        _check_int(field, token, 0, None)
    return tokens


def _allowed(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    tokens = tuple(sorted(set(_token_ids("allowed_token_ids", value))))
    if not tokens:
        raise InvalidRequestError("allowed_token_ids", "is empty; at least one token is needed")
    return tokens


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    """Pairs of token and bias, by token; JSON's objects have strings for keys."""
    if value is None:
        return ()
    pairs: dict[int, float] = {}
    for key, bias in _bias_pairs(value):
        token = key
        if isinstance(key, str) and len(key) < 20 and key.isascii() and key.isdecimal():
            token = int(key)
        _check_int("logit_bias", token, 0, None)
        _check_number("logit_bias", bias, -100.0, 100.0)
        pairs[cast("int", token)] = float(cast("float", bias))
    if len(pairs) > MAX_LOGIT_BIAS:
        raise InvalidRequestError("logit_bias", f"{len(pairs)} tokens, at most {MAX_LOGIT_BIAS}")
    return tuple(sorted(pairs.items()))


def _bias_pairs(value: object) -> list[tuple[object, object]]:
    if isinstance(value, Mapping):
        return list(cast("Mapping[object, object]", value).items())
    if isinstance(value, tuple | list):
        pairs = list(cast("Iterable[object]", value))
        if all(isinstance(pair, tuple) and len(cast("tuple[object]", pair)) == 2 for pair in pairs):
            return cast("list[tuple[object, object]]", pairs)
    raise InvalidRequestError("logit_bias", f"{value!r} is not a mapping of token ids to numbers")
