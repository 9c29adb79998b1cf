"""What streamed text must be: the cut at the first stop string, whatever the pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

S = TypeVar("S", str, list[int])


def cut_at_stop(text: str, stops: Sequence[str], *, first: int = 0) -> tuple[str, str | None]:
    """Look at ever longer beginnings of ``text``, from ``first`` characters on, for a stop string.

    Returns:
        The text before the first stop string that is complete (the longest of several), and it.
    """
    for end in range(first, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def pieces(whole: S, cuts: Sequence[int]) -> list[S]:
    """``whole`` cut at the given places, which may repeat or lie past its end."""
    edges = [0, *sorted(min(edge, len(whole)) for edge in cuts), len(whole)]
    return [whole[start:end] for start, end in pairwise(edges)]
