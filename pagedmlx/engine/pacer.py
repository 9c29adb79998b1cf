"""Pacer: times steps, so that prompts don't keep running streams waiting for long."""

from __future__ import annotations

from collections.abc import Callable

from pagedmlx.core.pace import PrefillPace, StepShare
from pagedmlx.core.step import Step

_BEGUN = 0.5
"""Share of a step that is taken to be done when the host has dispatched it.

MLX lets the host run only so many tasks ahead of the device, so it comes back from a large step
when some of it is done, and only then sees that the step before has ended. How much depends on the
model's layers; it is 0.7 of 32."""

_WAITED = 0.05
"""Share of a measurement from which on the host can be said to have waited for a step's end."""


class Pacer:
    """Measures steps in the order in which they are carried out.

    Args:
        bound_s: Longest time that a stream should wait for its next token.
        least: Prompt tokens that a step may always compute.
        clock: Seconds, monotonic.
    """

    def __init__(self, bound_s: float, least: int, clock: Callable[[], float]) -> None:
        self._pace = PrefillPace(bound_s, least)
        self._clock = clock
        # Steps under way, with when their dispatch began.
        self._starts: dict[int, tuple[Step, float]] = {}
        self._waits_since = self._last_end = clock()
        # How much of the step under way was done at the last end.
        self._begun = 0.0

    def start(self, step: Step) -> None:
        """A step is about to be dispatched."""
        self._starts[step.step_id] = step, self._clock()

    def wait(self) -> None:
        """The oldest step under way is about to be waited for."""
        self._waits_since = self._clock()

    def end(self, step: Step) -> int:
        """A step's tokens are there.

        Returns:
            Prompt tokens that the next step may compute beside streams.
        """
        now = self._clock()
        start = self._starts.pop(step.step_id)[1]
        # The device began with it when it was done with the one before.
        began = max(start, self._last_end)
        shares = [StepShare(step.num_prompt_tokens, 1.0 - self._begun)]
        self._begun = 0.0
        if now - self._waits_since < _WAITED * (now - began):
            for following, _ in self._starts.values():
                self._begun = _BEGUN
                shares.append(StepShare(following.num_prompt_tokens, _BEGUN))
        self._last_end = now
        self._pace.note(shares, now - began)
        return self._pace.max_prompt_tokens
