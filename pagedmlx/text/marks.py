"""Finds marks in text that comes in pieces; what may become one waits."""

from __future__ import annotations

from collections.abc import Iterable


def next_mark(text: str, marks: Iterable[str], *, is_last: bool = False) -> tuple[int, str]:
    """The first mark in a text; of two at the same place, the longer one.

    Args:
        text: As far as it has come.
        marks: None of them empty.
        is_last: Whether no more text comes.

    Returns:
        Its place and itself. If there is none, or a longer one may still come there, the empty
        string, and the place before which there will be none whatever follows.
    """
    best, found, partial = len(text), "", len(text)
    for mark in marks:
        place = text.find(mark)
        if place >= 0 and (place < best or (place == best and len(mark) > len(found))):
            best, found = place, mark
        if not is_last:
            partial = min(partial, _partial(text, mark))
    return (best, found) if partial > best else (partial, "")


def _partial(text: str, mark: str) -> int:
    """Where a proper beginning of the mark ends the text; its length if none does."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return len(text) - length
    return len(text)
