"""Format: what the endpoints differ in once the engine answers, and the framing of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagedmlx.errors import PagedMLXError
from pagedmlx.server.errors import to_json
from pagedmlx.server.writer import Piece, Usage

COMMENT = b": keep-alive\n\n"
"""What a stream says when there is nothing to say; clients pass over it."""


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer has from its beginning on.

    Attributes:
        id: Of the answer.
        created: When it began, in seconds of the epoch.
        model: The name that it carries.
        usage: Counts its tokens while it grows.
    """

    id: str
    created: int
    model: str
    usage: Usage


class Format(Protocol):
    """Shapes one answer as its endpoint has it: whole, or as the events of a stream."""

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The body of a whole answer; each piece is all of a choice."""
        ...

    def begin(self) -> bytes:
        """What a stream sends before the engine has done anything; it isn't empty."""
        ...

    def piece(self, piece: Piece) -> bytes:
        """The events of what has come; empty if it shows nothing."""
        ...

    def end(self) -> bytes:
        """The events after the last piece; not empty."""
        ...

    def keep_alive(self) -> bytes:
        """What is sent while nothing comes."""
        ...

    def error(self, error: PagedMLXError) -> bytes:
        """The last events of a stream that fails."""
        ...


def event(body: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event.

    Args:
        body: Its data.
        name: Its type; without one clients tell events by their data alone.
    """
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + to_json(body) + b"\n\n"
