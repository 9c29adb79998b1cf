"""Pacer: times steps, so that prompts don't keep running streams waiting for long."""

from __future__ import annotations

from collections.abc import Callable

from pagedmlx.core.pace import PrefillPace
from pagedmlx.core.step import Step


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
        self._starts: dict[int, float] = {}
        self._last_end = clock()

    def start(self, step: Step) -> None:
        """A step is about to be dispatched."""
        self._starts[step.step_id] = self._clock()

    def end(self, step: Step) -> int:
        """A step's tokens are there.

        Returns:
            Prompt tokens that the next step may compute beside streams.
        """
        now = self._clock()
        # The device began with it when it was done with the one before.
        began = max(self._starts.pop(step.step_id), self._last_end)
        self._last_end = now
        self._pace.note(step.num_prompt_tokens, now - began)
        return self._pace.max_prompt_tokens
