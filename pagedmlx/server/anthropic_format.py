"""How ``/v1/messages`` answers: content blocks, or the events in which they grow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from pagedmlx.errors import PagedMLXError
from pagedmlx.server.errors import anthropic_error_body
from pagedmlx.server.format import COMMENT, Head, event
from pagedmlx.server.sections import Change, Grown, Kind, Opened, Section, Sections
from pagedmlx.server.writer import Piece

_STOP_REASONS: Mapping[str, str] = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageFormat:
    """Answers with one message.

    Args:
        head: Of the answer.
        stop_sequences: Texts of the request that end an answer.
    """

    def __init__(self, head: Head, stop_sequences: Sequence[str]) -> None:
        self._head = head
        self._stop_sequences = frozenset(stop_sequences)
        self._sections = Sections()
        self._has_begun = False
        self._ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The message."""
        (piece,) = pieces
        self._take(piece)
        content = [_block(section) for section in self._sections.closed]
        return {**self._message(), "content": content, **self._ending}

    def begin(self) -> bytes:
        """A comment; the message begins once it is known how much of the prompt was cached."""
        return COMMENT

    def piece(self, piece: Piece) -> bytes:
        """Blocks that begin, grow and end."""
        data = b""
        if not self._has_begun:
            self._has_begun = True
            data = _event("message_start", message=self._message())
        return data + b"".join(map(_changed, self._take(piece)))

    def end(self) -> bytes:
        """Why it ended, the token counts, and the end mark."""
        return _event("message_delta", delta=self._ending, usage=_usage(self._head)) + _event(
            "message_stop"
        )

    def keep_alive(self) -> bytes:
        """A ping; a comment before the message has begun, since clients want that event first."""
        return _event("ping") if self._has_begun else COMMENT

    def error(self, error: PagedMLXError) -> bytes:
        """The body that an error answer would have."""
        return event(anthropic_error_body(error), "error")

    def _take(self, piece: Piece) -> list[Change]:
        changes = list(self._sections.add(piece.parts))
        if piece.finish_reason is not None:
            changes += self._sections.finish(is_cut=piece.finish_reason == "length")
            self._ending = self._end_of(piece)
        return changes

    def _end_of(self, piece: Piece) -> dict[str, Any]:
        if piece.finish_reason == "stop" and piece.stop_reason in self._stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop_reason}
        reason = _STOP_REASONS.get(piece.finish_reason or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._head),
        }


def _changed(change: Change) -> bytes:
    section = change.section
    if isinstance(change, Opened):
        return _event("content_block_start", index=section.index, content_block=_empty(section))
    if isinstance(change, Grown):
        return _delta(section, **_more(section.kind, change.text))
    data = b""
    if section.kind is Kind.REASONING:
        data = _delta(section, type="signature_delta", signature=_signature(section.text))
    return data + _event("content_block_stop", index=section.index)


def _delta(section: Section, **delta: Any) -> bytes:
    return _event("content_block_delta", index=section.index, delta=delta)


def _more(kind: Kind, text: str) -> dict[str, Any]:
    if kind is Kind.TEXT:
        return {"type": "text_delta", "text": text}
    if kind is Kind.REASONING:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _empty(section: Section) -> dict[str, Any]:
    if section.kind is Kind.TEXT:
        return {"type": "text", "text": ""}
    if section.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": section.call_id, "name": section.name, "input": {}}


def _block(section: Section) -> dict[str, Any]:
    block = _empty(section)
    if section.kind is Kind.TEXT:
        return block | {"text": section.text}
    if section.kind is Kind.REASONING:
        return block | {"thinking": section.text, "signature": _signature(section.text)}
    return block | {"input": _input(section.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; a part of them, which is no JSON, stays as it is under a name."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _signature(thought: str) -> str:
    """Something to have: clients drop thinking without a signature; nobody checks it here."""
    return blake2b(thought.encode("utf-8", "surrogatepass"), digest_size=24).hexdigest()


def _usage(head: Head) -> dict[str, Any]:
    cached = head.usage.num_cached_tokens
    return {
        "input_tokens": head.usage.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": head.usage.num_output_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
