"""CallReader: one call of a tool, from its start mark on, to parts. CallWriter numbers calls."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from pagedmlx.text.answer_parts import (
    AnswerPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from pagedmlx.text.answer_style import ToolSyntax
from pagedmlx.text.call_json import ObjectEnd
from pagedmlx.text.call_xml import XML_CALL, XmlArguments
from pagedmlx.text.marks import next_mark

_MAX_HEADER = 1024
_ALPHABET = string.ascii_letters + string.digits


class CallWriter:
    """Numbers an answer's calls and gives them ids.

    Args:
        limit: Most calls; what comes after them is left out.
        id_length: Of bare ids of letters and digits; 0 makes longer ones that begin with ``call_``.

    Attributes:
        is_open: Whether a call has begun and not ended.
        num_calls: Calls that have begun.
    """

    def __init__(self, *, limit: int | None = None, id_length: int = 0) -> None:
        self._limit = limit
        self._id_length = id_length
        self._is_left_out = False
        self.is_open = False
        self.num_calls = 0

    def begin(self, name: str, call_id: str | None = None) -> list[AnswerPart]:
        """A call begins."""
        self._is_left_out = self.num_calls == self._limit
        if self._is_left_out:
            return []
        self.num_calls += 1
        self.is_open = True
        return [ToolCallBegin(self.num_calls - 1, call_id or self._new_id(), name)]

    def arguments(self, text: str) -> list[AnswerPart]:
        """More of its arguments."""
        if self._is_left_out or not text:
            return []
        return [ToolCallArguments(self.num_calls - 1, text)]

    def end(self) -> list[AnswerPart]:
        """It is complete."""
        if self._is_left_out:
            return []
        self.is_open = False
        return [ToolCallEnd(self.num_calls - 1)]

    def whole(self, calls: Sequence[tuple[str, str, str | None]]) -> list[AnswerPart]:
        """Calls that are there at once: name, arguments and perhaps an id of each."""
        parts: list[AnswerPart] = []
        for name, arguments, call_id in calls:
            parts += [*self.begin(name, call_id), *self.arguments(arguments), *self.end()]
        return parts

    def _new_id(self) -> str:
        if self._id_length:
            return "".join(secrets.choice(_ALPHABET) for _ in range(self._id_length))
        return f"call_{secrets.token_hex(12)}"


class CallReader:
    """Reads one call, or several that share their marks.

    Where the arguments are JSON text they are passed on as they come; else all of it comes out at
    the end mark. What is no call comes out as the text that it is.

    Args:
        syntax: How calls are written.
        tools: What may be called, in OpenAI's form.
        writer: Numbers the calls.
    """

    def __init__(
        self, syntax: ToolSyntax, tools: Sequence[Mapping[str, Any]], writer: CallWriter
    ) -> None:
        self._syntax = syntax
        self._tools = tools
        self._writer = writer
        self._held = ""
        self._num_searched = 0
        self._read = self._read_head
        self._end = ObjectEnd("")
        self._xml: XmlArguments | None = None
        self._parts: list[AnswerPart] = []

    def add(self, text: str, *, is_last: bool = False) -> tuple[list[AnswerPart], str | None]:
        """Go on with the next text.

        Returns:
            What is certain by now, and the text behind the call if that has ended.
        """
        self._held += text
        rest = self._read(is_last=is_last)
        parts, self._parts = self._parts, []
        return parts, rest

    def _read_head(self, *, is_last: bool) -> str | None:
        header = self._syntax.header
        if self._syntax.is_xml and (match := XML_CALL.match(self._held, 0, _MAX_HEADER)):
            self._parts += self._writer.begin(match["name"])
            self._held = self._held[match.end() :]
            ends = (self._syntax.end, self._syntax.start)
            self._xml = XmlArguments(self._schema(match["name"]), ends)
            self._read = self._read_xml
            return self._read(is_last=is_last)
        if header is not None:
            match = header.match(self._held, 0, _MAX_HEADER)
            if match and (name := _name(match["name"])):
                call_id = match.groupdict().get("id")
                self._parts += self._writer.begin(name, call_id)
                self._held = self._held[match.end() :]
                self._end = ObjectEnd(self._syntax.end)
                self._read = self._read_arguments
                return self._read(is_last=is_last)
        return self._read_whole(is_last=is_last)

    def _read_arguments(self, *, is_last: bool) -> str | None:
        length, is_end = self._end.find(self._held)
        arguments, self._held = self._held[:length], self._held[length:]
        self._parts += self._writer.arguments(arguments)
        if is_end:
            self._parts += self._writer.end()
            self._read = self._read_tail
            return self._read(is_last=is_last)
        if is_last:
            self._parts += self._writer.arguments(self._held)
            return ""
        return None

    def _read_xml(self, *, is_last: bool) -> str | None:
        assert self._xml is not None
        held, self._held = self._held, ""
        arguments, rest = self._xml.add(held, is_last=is_last)
        self._parts += self._writer.arguments(arguments)
        if rest is None:
            return "" if is_last else None
        self._parts += self._writer.end()
        if self._xml.stray:
            self._parts.append(TextPart(self._xml.stray))
        self._held = rest
        self._read = self._read_tail
        return self._read(is_last=is_last)

    def _schema(self, name: str) -> Mapping[str, Any]:
        functions = (tool["function"] for tool in self._tools)
        found = (each.get("parameters", {}) for each in functions if each["name"] == name)
        return next(found, {})

    def _read_tail(self, *, is_last: bool) -> str | None:
        """What closes the call: a brace or nothing, then the end mark."""
        end, closes = self._syntax.end, self._syntax.closes
        tail = self._held.lstrip()
        if not end:
            if not closes or (tail and not tail.startswith(closes)) or is_last:
                return self._held
            return tail.removeprefix(closes) if tail else None
        place, mark = next_mark(self._held, (end, self._syntax.start))
        if not mark and not is_last:
            return None
        inner = self._held[:place].strip().removeprefix(closes).strip()
        # More keys of the object say nothing; whatever else is there isn't lost.
        if inner and not inner.startswith(","):
            self._parts.append(TextPart(inner))
        # The next call may begin without an end of this one.
        return self._held[place + len(mark) if mark == end else place :] if mark else ""

    def _read_whole(self, *, is_last: bool) -> str | None:
        place = self._find_end()
        if place is None:
            if not is_last:
                return None
            place = len(self._held)
        body, end = self._held[:place], self._syntax.end
        rest = self._held[place + len(end) :]
        is_cut = bool(end) and place == len(self._held)
        calls = [] if is_cut else self._parse(body)
        if calls:
            self._parts += self._writer.whole(calls)
        else:
            start = "" if self._syntax.keeps_start else self._syntax.start
            self._parts.append(TextPart(start + self._held[: len(self._held) - len(rest)]))
        return rest

    def _find_end(self) -> int | None:
        end = self._syntax.end
        if end:
            place = self._held.find(end, max(0, self._num_searched - len(end)))
            self._num_searched = len(self._held)
            return None if place < 0 else place
        fresh = self._held[self._num_searched :]
        if self._held.lstrip()[:1] not in ("[", "{"):
            return None
        self._num_searched = len(self._held)
        length, is_end = self._end.find(fresh)
        return self._num_searched - len(fresh) + length if is_end else None

    def _parse(self, body: str) -> list[tuple[str, str, str | None]]:
        try:
            return [_checked(call) for call in self._syntax.parse(body, self._tools)]
        except Exception:  # parsers fail in any way at what a model may write
            return []


def _name(text: str) -> str:
    """The name in a header; nothing if it is broken."""
    if not text.startswith('"'):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return ""


def _checked(call: Mapping[str, Any]) -> tuple[str, str, str | None]:
    name, arguments, call_id = call["name"], call["arguments"], call.get("id")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("no call")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return name, text, call_id if isinstance(call_id, str) and call_id else None
