"""PrefillPace: how many prompt tokens a step may take beside running streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_TARGET = 0.9
"""Share of the bound that is aimed at; steps are never equally long."""
_WEIGHT = 0.5
"""Of the newest measurement."""
_LEAST, _MOST = 0.5, 4.0
"""A measurement counts as at least and at most so many times what was expected: one hiccup is no
trend, and what seems cheap may only not be done yet."""


_NEAR = 0.8
"""Share of the target from which on it counts what having prompts costs at all."""
_SOME = 1e-9
"""Seconds: less is nothing."""
_MORE = 1.25
"""A step may always take so many times as long as it would with prompts of hardly any tokens."""
_KEPT = 0.8
"""Weight of a measurement against the next one, in the search for what having prompts costs."""
_SPREAD = 0.02
"""Relative variance of the steps' tokens from which on it shows."""
_MOST_AT_ONCE = 0.9
"""Share of the time of a step's prompts that may be taken for that; the rest is their tokens'."""


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

    A step is taken to last as long as one that only decodes, and then so much for each prompt
    token. Whatever else it costs goes into the latter, which settles at the right number all the
    same, if the next step has about as many tokens. But where steps come near the target
    whatever they hold, because of the host's work for a graph that isn't compiled, fewer tokens
    gain nobody anything. So what having prompts costs at all is learnt too, and counts there.

    Args:
        bound_s: Longest time that a stream should wait for its next token. Where steps can't be
            that short or hardly any of it is left to prompts, they take longer.
        least: Tokens that prompts always get, or half as many, so that they come to an end.
    """

    def __init__(self, bound_s: float, least: int) -> None:
        self._target_s = _TARGET * bound_s
        self._least = least
        self._decode_s = 0.0
        self._token_s: float | None = None
        self._share_s: float | None = None
        self._prompts_s = _Intercept()
        self._most_seen = self._last = least

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
        self._last = shares[-1].num_prompt_tokens
        self._most_seen = max(self._most_seen, *(each.num_prompt_tokens for each in shares))
        num_prompts = sum(each.share for each in shares if each.num_prompt_tokens)
        beside_s = max(seconds - num_steps * self._decode_s, 0.0)
        self._prompts_s.note(num_tokens / num_prompts, beside_s / num_prompts)
        self._share_s = _mean(self._share_s, beside_s / num_tokens)
        token_s = max(beside_s - num_prompts * self._prompts_s.value, 0.0) / num_tokens
        self._token_s = _mean(self._token_s, token_s)

    @property
    def max_prompt_tokens(self) -> int:
        """Prompt tokens of the next step that other sequences must wait for."""
        if self._token_s is None or self._share_s is None:
            return self._least
        # Where steps are as slow without prompts, prompts would wait long to gain streams little.
        target_s = max(self._target_s, 2 * self._decode_s)
        fitting = (target_s - self._decode_s) / max(self._share_s, _SOME)
        if self._decode_s + self._prompts_s.y > _NEAR * target_s:
            shortest_s = self._decode_s + self._prompts_s.value
            fitting = (max(target_s, _MORE * shortest_s) - shortest_s) / max(self._token_s, _SOME)
        if fitting < self._least:
            # Turn about, so that it shows whether fewer take less time.
            half = max(1, self._least // 2)
            return half if self._last > half else self._least
        # Nobody knows yet what a much larger step would cost.
        return min(int(fitting), 2 * self._most_seen)


class _Intercept:
    """What y is where x is 0, by least squares, the newest points counting most.

    Attributes:
        y: The mean of y.
        value: 0 to nearly the mean of y. It stays as it is while x hardly varies.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5
        self.value = self.y = 0.0

    def note(self, x: float, y: float) -> None:
        """Learn from one more point: x is positive, y not negative."""
        self._sums = [
            _KEPT * old + new for old, new in zip(self._sums, (1, x, y, x * x, x * y), strict=True)
        ]
        weight, *sums = self._sums
        x, self.y, xx, xy = (each / weight for each in sums)
        variance = xx - x * x
        if variance > _SPREAD * x * x:
            self.value = max(self.y - (xy - x * self.y) / variance * x, 0.0)
        self.value = min(self.value, _MOST_AT_ONCE * self.y)


def _mean(old: float | None, new: float) -> float:
    if not old:  # nothing, too, tells nothing of what is next
        return new
    return old + _WEIGHT * (min(max(new, _LEAST * old), _MOST * old) - old)
