"""Frees what the frames of a caught exception hold: its traceback would keep arrays alive."""

from __future__ import annotations

import traceback


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of every frame in an exception's tracebacks.

    Those of the exceptions that led to it are cleared too; the lines stay readable.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            traceback.clear_frames(current.__traceback__)
            pending += [current.__cause__, current.__context__]
