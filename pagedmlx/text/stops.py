"""StopMatcher: finds stop strings in text that comes in pieces; holds back what may become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string is complete.

    The first stop string to be *complete* wins; of those complete at the same character, the
    longest. Text is released up to the longest tail that begins some stop string, so nothing of a
    match is ever shown (unless it is to be part of the text), and how the text is cut into pieces
    makes no difference. Each stop string is followed by its own Knuth-Morris-Pratt automaton:
    constant work per character, amortised.

    Args:
        stops: Stop strings, none of them empty.
        include: The match is part of the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.match: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Take the next piece of text; return what is safe to show.

        Args:
            text: The piece; once a match was found it is ignored.
            armed: Whether a stop string that is completed by this piece counts. One that doesn't
                count is passed on like any other text, for good.
        """
        if self.match is not None:
            return ""
        pending = self._held + text
        for end in range(len(self._held), len(pending)):
            complete = self._advance(pending[end])
            if complete and armed:
                self.match = max(complete, key=len)
                self._held = ""
                return pending[: end + 1 - (0 if self._include else len(self.match))]
        shown = len(pending) - max(self._matched, default=0)
        self._held = pending[shown:]
        return pending[:shown]

    def flush(self) -> str:
        """The text that was held back, now that no more will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> list[str]:
        """Move every automaton by one character; return the stop strings that it completes."""
        complete: list[str] = []
        for index, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                complete.append(stop)
                matched = borders[matched - 1]
            self._matched[index] = matched
        return complete


def _borders(word: str) -> tuple[int, ...]:
    """For each prefix of ``word``, the length of its longest proper prefix that also ends it."""
    borders = [0]
    for char in word[1:]:
        border = borders[-1]
        while border and word[border] != char:
            border = borders[border - 1]
        borders.append(border + (word[border] == char))
    return tuple(borders)
