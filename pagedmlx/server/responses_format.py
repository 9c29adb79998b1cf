"""How ``/v1/responses`` answers: a list of items, or the events in which they grow."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedmlx.errors import PagedMLXError
from pagedmlx.server.errors import error_body
from pagedmlx.server.format import COMMENT, Head, event
from pagedmlx.server.responses_input import seal
from pagedmlx.server.responses_tools import ResponseTools
from pagedmlx.server.sections import Change, Grown, Kind, Opened, Section, Sections
from pagedmlx.server.writer import Piece

_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
_STEMS = {
    Kind.REASONING: "reasoning_text",
    Kind.TEXT: "output_text",
    Kind.CALL: "function_call_arguments",
}
_CUT = "length"


class ResponseFormat:
    """Answers with one response object.

    Args:
        head: Of the answer.
        echo: What the response repeats of the request.
        keep: Gets the finished response.
        tools: Of the request.
        seals_reasoning: Whether reasoning comes in ``encrypted_content`` too.
    """

    def __init__(
        self,
        head: Head,
        echo: Mapping[str, Any],
        keep: Callable[[dict[str, Any]], None],
        tools: ResponseTools,
        *,
        seals_reasoning: bool,
    ) -> None:
        self._head = head
        self._echo = echo
        self._keep = keep
        self._tools = tools
        self._seals_reasoning = seals_reasoning
        self._sections = Sections()
        self._ids: list[str] = []
        self._items: list[dict[str, Any]] = []
        self._num_events = 0
        self._is_cut = False

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The response, complete or cut."""
        (piece,) = pieces
        self.piece(piece)
        return self._final()

    def begin(self) -> bytes:
        """The response as it will grow."""
        body = self._response("in_progress")
        return self._event("response.created", response=body) + self._event(
            "response.in_progress", response=body
        )

    def piece(self, piece: Piece) -> bytes:
        """Items that begin, grow and end."""
        changes = list(self._sections.add(piece.parts))
        if piece.finish_reason is not None:
            self._is_cut = piece.finish_reason == _CUT
            changes += self._sections.finish(is_cut=self._is_cut)
        return b"".join(map(self._change, changes))

    def end(self) -> bytes:
        """The whole response."""
        final = self._final()
        return self._event(f"response.{final['status']}", response=final)

    def keep_alive(self) -> bytes:
        """A comment."""
        return COMMENT

    def error(self, error: PagedMLXError) -> bytes:
        """The response, failed."""
        told = error_body(error)["error"]
        code = "server_error" if error.http_status >= 500 else told["code"]
        failed = {"code": code, "message": told["message"]}
        return self._event("response.failed", response=self._response("failed") | {"error": failed})

    def _final(self) -> dict[str, Any]:
        if self._is_cut:
            final = self._response("incomplete")
            final["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            final = self._response("completed") | {"completed_at": int(time.time())}
        final["usage"] = _usage(self._head)
        self._keep(final)
        return final

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": list(self._items),
            "usage": None,
            **self._echo,
        }

    def _change(self, change: Change) -> bytes:
        section = change.section
        if isinstance(change, Opened):
            self._ids.append(f"{self._id_prefix(section)}_{uuid.uuid4().hex}")
            return self._opened(section)
        if isinstance(change, Grown):
            # Plain text within JSON comes when it is whole.
            is_held = self._is_custom(section)
            return b"" if is_held else self._delta(section, change.text)
        self._items.append(self._item(section))
        return self._closed(section)

    def _opened(self, section: Section) -> bytes:
        item = self._item(section) | {"status": "in_progress"}
        if section.kind is Kind.CALL:
            return self._of_item("response.output_item.added", section, item=item)
        return self._of_item(
            "response.output_item.added", section, item=item | {"content": []}
        ) + self._on_item(section, "response.content_part.added", part=_part(section))

    def _delta(self, section: Section, text: str) -> bytes:
        logprobs = {"logprobs": []} if section.kind is Kind.TEXT else {}
        return self._on_item(section, f"{self._stem(section)}.delta", delta=text, **logprobs)

    def _closed(self, section: Section) -> bytes:
        item = self._items[-1]
        data = b""
        if self._is_custom(section):
            said: dict[str, Any] = {"input": item["input"]}
            data = self._delta(section, item["input"])
        elif section.kind is Kind.CALL:
            said = {"arguments": section.text, "name": item["name"]}
        else:
            said = {"text": section.text}
            if section.kind is Kind.TEXT:
                said["logprobs"] = []
        data += self._on_item(section, f"{self._stem(section)}.done", **said)
        if section.kind is not Kind.CALL:
            data += self._on_item(section, "response.content_part.done", part=_part(section))
        return data + self._of_item("response.output_item.done", section, item=item)

    def _item(self, section: Section) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._ids[section.index]}
        if section.kind is Kind.REASONING:
            item |= {"type": "reasoning", "summary": [], "content": [_part(section)]}
            if self._seals_reasoning:
                item["encrypted_content"] = seal(section.text)
        elif section.kind is Kind.TEXT:
            item |= {"type": "message", "role": "assistant", "content": [_part(section)]}
        else:
            item |= self._tools.item(section.name, section.call_id, section.text)
        return item | {"status": "completed" if section.is_whole else "incomplete"}

    def _is_custom(self, section: Section) -> bool:
        return section.kind is Kind.CALL and self._tools.is_custom(section.name)

    def _id_prefix(self, section: Section) -> str:
        return "ctc" if self._is_custom(section) else _PREFIXES[section.kind]

    def _stem(self, section: Section) -> str:
        if self._is_custom(section):
            return "response.custom_tool_call_input"
        return f"response.{_STEMS[section.kind]}"

    def _on_item(self, section: Section, name: str, /, **fields: Any) -> bytes:
        content = {} if section.kind is Kind.CALL else {"content_index": 0}
        item_id = self._ids[section.index]
        return self._of_item(name, section, item_id=item_id, **content, **fields)

    def _of_item(self, name: str, section: Section, /, **fields: Any) -> bytes:
        return self._event(name, output_index=section.index, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({"type": name, "sequence_number": number, **fields}, name)


def _part(section: Section) -> dict[str, Any]:
    if section.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": section.text}
    return {"type": "output_text", "text": section.text, "annotations": [], "logprobs": []}


def _usage(head: Head) -> dict[str, Any]:
    usage = head.usage
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }
