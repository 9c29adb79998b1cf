"""The format that chat and completions share: choices, token counts where asked, one ``[DONE]``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagedmlx.engine.inputs import PreparedJob
from pagedmlx.errors import PagedMLXError
from pagedmlx.server.errors import error_body
from pagedmlx.server.format import COMMENT, Format, Head, event
from pagedmlx.server.writer import Piece, Writer

_DONE = b"data: [DONE]\n\n"


class ChoiceFormat:
    """Answers that are lists of choices.

    An error in a stream is an event with ``error``, and no ``[DONE]`` follows it.

    Args:
        head: Of the answer.
        writer: Writes its choices.
        include_usage: Whether a stream ends with a chunk of token counts.
    """

    def __init__(self, head: Head, writer: Writer, *, include_usage: bool) -> None:
        self._head = head
        self._writer = writer
        self._include_usage = include_usage

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """All choices, the token counts, and what the writer tells beside them."""
        return {
            **self._opening(self._writer.kind),
            "choices": [self._writer.choice(piece) for piece in pieces],
            "usage": self._head.usage.as_json(),
            **self._writer.extras(pieces),
        }

    def begin(self) -> bytes:
        """A comment: it brings the headers through whatever waits for a first byte."""
        return COMMENT

    def piece(self, piece: Piece) -> bytes:
        """A chunk for each choice that the writer makes of it."""
        return b"".join(self._chunk([choice]) for choice in self._writer.chunks(piece))

    def end(self) -> bytes:
        """The token counts, if they were asked for, and the end mark."""
        if not self._include_usage:
            return _DONE
        return self._chunk([], self._head.usage.as_json()) + _DONE

    def keep_alive(self) -> bytes:
        """A comment."""
        return COMMENT

    def error(self, error: PagedMLXError) -> bytes:
        """The body that an error answer would have."""
        return event(error_body(error))

    def _opening(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {"id": head.id, "object": kind, "created": head.created, "model": head.model}

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        body = {**self._opening(self._writer.chunk_kind), "choices": choices}
        return event({**body, "usage": usage} if self._include_usage else body)


def choice_format(
    writer: Callable[[Sequence[PreparedJob]], Writer], *, include_usage: bool
) -> Callable[[Head, Sequence[PreparedJob]], Format]:
    """What an ``Ask`` needs to be answered with choices."""
    return lambda head, prepared: ChoiceFormat(head, writer(prepared), include_usage=include_usage)
