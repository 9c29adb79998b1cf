"""HarmonyParser: answers of several messages, each with a channel, as gpt-oss writes them.

The format is described in OpenAI's "harmony response format"; the prompt ends with an opened
message of the assistant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from pagedmlx.text.answer_parts import AnswerPart, ReasoningPart, TextPart
from pagedmlx.text.answer_style import HARMONY_TOKENS, AnswerStyle
from pagedmlx.text.call_reader import CallWriter
from pagedmlx.text.marks import next_mark

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


class _Body(Enum):
    """What a message is."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class HarmonyParser:
    """See ``AnswerParser``.

    The channel ``analysis`` is reasoning, a message to a function is a call of it, all else is
    text. Messages of the same kind are paragraphs.

    Args:
        style: How the model writes.
        tools: What it may call.
        max_calls: Further calls are left out.
    """

    def __init__(
        self,
        style: AnswerStyle,
        tools: Sequence[Mapping[str, Any]],
        *,
        max_calls: int | None,
    ) -> None:
        self._marks = tuple({*HARMONY_TOKENS, *style.control})
        self._has_tools = bool(tools)
        self._writer = CallWriter(limit=max_calls)
        self._header = ""
        self._body: _Body | None = None
        self._has_said: set[_Body] = set()
        self._is_first = True  # nothing of this message has been said
        self._arguments = ""
        self._buffer = ""
        self._parts: list[AnswerPart] = []

    @property
    def is_reasoning(self) -> bool:
        """Whether the message that is being written is reasoning."""
        return self._body is _Body.REASONING

    @property
    def has_tool_calls(self) -> bool:
        """Whether there are calls, all of them complete."""
        return self._writer.num_calls > 0 and not self._writer.is_open

    def add(self, text: str) -> list[AnswerPart]:
        """Take the next text; return what is certain now."""
        self._buffer += text
        return self._go_on(is_last=False)

    def finish(self) -> list[AnswerPart]:
        """The output has ended: return the rest."""
        self._parts += self._go_on(is_last=True)
        if self._body is None and "<|" not in self._header:
            # It hasn't begun any message.
            self._begin(_Body.TEXT)
            self._say(self._header.removeprefix("assistant"))
        self._end(is_cut=True)
        parts, self._parts = self._parts, []
        return parts

    def _go_on(self, *, is_last: bool) -> list[AnswerPart]:
        while True:
            place, mark = next_mark(self._buffer, self._marks, is_last=is_last)
            text, self._buffer = self._buffer[:place], self._buffer[place + len(mark) :]
            if self._body is None:
                self._header += text
            else:
                self._say(text)
            if not mark:
                break
            self._pass(mark)
        parts, self._parts = self._parts, []
        return parts

    def _pass(self, mark: str) -> None:
        if mark in ("<|end|>", "<|call|>", "<|return|>", "<|start|>"):
            self._end()
        elif mark == "<|message|>":
            self._open()
        elif self._body is None:
            self._header += mark
        elif mark == "<|channel|>":
            self._end()
            self._header = mark

    def _open(self) -> None:
        """The header is there, the body begins."""
        channel, recipient = _CHANNEL.search(self._header), _RECIPIENT.search(self._header)
        if recipient and self._has_tools:
            self._begin(_Body.CALL)
            self._parts += self._writer.begin(recipient[1])
        elif channel and channel[1] == "analysis":
            self._begin(_Body.REASONING)
        else:
            self._begin(_Body.TEXT)

    def _begin(self, body: _Body) -> None:
        self._body = body
        self._is_first = True
        self._arguments = ""

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._body is _Body.CALL:
            self._arguments += text
            self._parts += self._writer.arguments(text)
            return
        assert self._body is not None
        if self._is_first and self._body in self._has_said:
            text = f"\n\n{text}"
        self._is_first = False
        self._has_said.add(self._body)
        is_reasoning = self._body is _Body.REASONING
        self._parts.append(ReasoningPart(text) if is_reasoning else TextPart(text))

    def _end(self, *, is_cut: bool = False) -> None:
        if self._body is _Body.CALL and not (is_cut and not _is_json(self._arguments)):
            if not self._arguments.strip():
                self._parts += self._writer.arguments("{}")
            self._parts += self._writer.end()
        self._body, self._header = None, ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
