"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str, float | None], None]
"""Called with what is being done and the share done, from 0 to 1, or None when unknown."""


def ignore_progress(_what: str, _share: float | None) -> None:
    """The callback for those who don't want to know."""
