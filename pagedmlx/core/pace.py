"""PrefillPace: how many prompt tokens a step may take beside running streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_TARGET = 0.75
"""Share of the bound that is aimed at. Steps are never equally long: some are traced, some take
another kernel, some fall on a busy moment of the host."""
_WEIGHT = 0.5
"""Of the newest measurement."""
_LEAST, _MOST = 0.5, 4.0
"""A measurement counts as at least and at most so many times what was expected: one hiccup is no
trend, and what seems cheap may only not be done yet."""


class StepShare(NamedTuple):
    """A part of what was measured.

    Attributes:
        num_prompt_tokens: The step's tokens of prompts; 0 for one that only decodes.
        share: How much of the step was carried out meanwhile, up to 1.
    """

    num_prompt_tokens: int
    share: float


class PrefillPace:
    """Learns from the steps' times how long prompt tokens take, beside steps that only decode.

    Steps may always come to take twice as long as one that only decodes.

    A step is taken to last as long as one that only decodes, and then so much for each prompt
    token. Whatever else it costs goes into the latter, which settles at the right number all the
    same, because the next step has about as many tokens.

    Args:
        bound_s: Longest time that a stream should wait for its next token.
        least: Tokens that prompts always get, so that they come to an end.
    """

    def __init__(self, bound_s: float, least: int) -> None:
        self._target_s = _TARGET * bound_s
        self._least = least
        self._decode_s = 0.0
        self._token_s = 0.0
        self._most_seen = least

    def note(self, shares: Sequence[StepShare], seconds: float) -> None:
        """Learn from how long something took.

        Args:
            shares: One step, or parts of several that follow each other.
            seconds: What they took together.
        """
        num_steps = sum(each.share for each in shares)
        num_tokens = sum(each.share * each.num_prompt_tokens for each in shares)
        if num_tokens == 0:
            self._decode_s = _mean(self._decode_s, seconds / num_steps)
            return
        self._most_seen = max(self._most_seen, *(each.num_prompt_tokens for each in shares))
        token_s = max(seconds - num_steps * self._decode_s, 0.0) / num_tokens
        self._token_s = _mean(self._token_s, token_s)

    @property
    def max_prompt_tokens(self) -> int:
        """Prompt tokens of the next step that other sequences must wait for."""
        if not self._token_s:
            return self._least
        # Where steps are as slow without prompts, prompts would wait long to gain streams little.
        target_s = max(self._target_s, 2 * self._decode_s)
        fitting = int((target_s - self._decode_s) / self._token_s)
        # Nobody knows yet what a much larger step would cost.
        return max(self._least, min(fitting, 2 * self._most_seen))


def _mean(old: float, new: float) -> float:
    if not old:  # nothing is known yet, or it seemed to take no time
        return new
    return old + _WEIGHT * (min(max(new, _LEAST * old), _MOST * old) - old)
