"""PrefillPace: how many prompt tokens a step may take beside running streams."""

from __future__ import annotations

_TARGET = 0.9
"""Share of the bound that is aimed at; steps are never equally long."""
_WEIGHT = 0.5
"""Of the newest measurement."""
_MOST = 4.0
"""A measurement counts as at most so many times what was expected: one hiccup is no trend."""


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
        self._token_s: float | None = None
        self._most_seen = least

    def note(self, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            num_prompt_tokens: Its tokens of prompts; 0 for one that only decoded.
            seconds: From the end of the step before it, or from its own start, to its end.
        """
        if num_prompt_tokens == 0:
            self._decode_s = _mean(self._decode_s or None, seconds)
            return
        self._most_seen = max(self._most_seen, num_prompt_tokens)
        token_s = max(seconds - self._decode_s, 0.0) / num_prompt_tokens
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


def _mean(old: float | None, new: float) -> float:
    if old is None:
        return new
    return old + _WEIGHT * (min(new, _MOST * old) - old)
