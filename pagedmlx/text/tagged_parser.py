"""TaggedParser: answers in which tags stand around reasoning and around calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedmlx.text.answer_parts import AnswerPart, ReasoningPart, TextPart
from pagedmlx.text.answer_style import AnswerStyle, ToolSyntax
from pagedmlx.text.call_reader import CallReader, CallWriter
from pagedmlx.text.marks import next_mark


class TaggedParser:
    """See ``AnswerParser``.

    Reasoning begins where an answer does, or behind a call. Elsewhere its tag is plain text, unless
    it is a special token.

    Args:
        style: How the model writes.
        syntax: How it writes calls; None if there is nothing to call.
        tools: What may be called.
        is_thinking: Whether the prompt has opened the reasoning.
        max_calls: Further calls are left out.
    """

    def __init__(
        self,
        style: AnswerStyle,
        syntax: ToolSyntax | None,
        tools: Sequence[Mapping[str, Any]],
        *,
        is_thinking: bool,
        max_calls: int | None,
    ) -> None:
        self._syntax = syntax
        self._tools = tools
        self._think_start, self._think_end = style.think or ("", "")
        self._hidden = {*style.dropped, *style.control, *(syntax.dropped if syntax else ())}
        self._start = syntax.start if syntax else ""
        # Marks of special tokens mean what they say, wherever they stand.
        self._strong = {
            mark
            for mark in (self._think_start, self._start)
            if any(token in mark for token in style.control)
        }
        self._text_marks = list(filter(None, (self._start, self._think_start, *self._hidden)))
        self._thought_marks = list(
            filter(None, (self._think_end, self._think_start, *self._strong, *self._hidden))
        )
        self._writer = CallWriter(limit=max_calls, id_length=syntax.id_length if syntax else 0)
        self._call: CallReader | None = None
        self._is_thinking = is_thinking
        self._is_at_start = True  # nothing but blanks has been said here
        self._trims = is_thinking  # line breaks behind a mark
        self._blanks = ""
        self._buffer = ""
        self._parts: list[AnswerPart] = []

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._is_thinking

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
        parts = self._go_on(is_last=True)
        if self._blanks and not self._is_thinking:
            parts.append(TextPart(self._blanks))
        self._blanks = ""
        return parts

    def _go_on(self, *, is_last: bool) -> list[AnswerPart]:
        while self._step(is_last=is_last):
            pass
        parts, self._parts = self._parts, []
        return parts

    def _step(self, *, is_last: bool) -> bool:
        """Go on to the next mark; whether there was one."""
        if self._call is not None:
            return self._read_call(self._call, is_last=is_last)
        marks = self._thought_marks if self._is_thinking else self._text_marks
        place, mark = next_mark(self._buffer, marks, is_last=is_last)
        self._say(self._buffer[:place])
        self._buffer = self._buffer[place + len(mark) :]
        if mark and mark == self._start:
            self._begin_call(mark)
        elif mark and self._is_thinking:
            self._mark_in_thought(mark)
        elif mark == self._think_start and mark and (self._is_at_start or mark in self._strong):
            self._turn(is_thinking=True)
        elif mark not in self._hidden:
            self._say(mark)
        return bool(mark)

    def _mark_in_thought(self, mark: str) -> None:
        if mark == self._think_end:
            self._turn(is_thinking=False)
        elif mark not in self._hidden and not (mark == self._think_start and self._is_at_start):
            self._say(mark)

    def _turn(self, *, is_thinking: bool) -> None:
        self._is_thinking = is_thinking
        self._is_at_start = self._trims = True
        self._blanks = ""

    def _begin_call(self, mark: str) -> None:
        assert self._syntax is not None
        if self._syntax.keeps_start:
            if not self._is_at_start:
                self._say(mark)
                return
            self._buffer = mark + self._buffer
        self._call = CallReader(self._syntax, self._tools, self._writer)

    def _read_call(self, call: CallReader, *, is_last: bool) -> bool:
        text, self._buffer = self._buffer, ""
        parts, rest = call.add(text, is_last=is_last)
        for part in parts:
            if isinstance(part, TextPart):
                self._say_call(part.text)
            else:
                # Blanks before it and what comes behind it are not the text's.
                self._turn(is_thinking=False)
                self._parts.append(part)
        if rest is None:
            return False
        self._buffer = rest
        self._call = None
        return bool(rest)

    def _say_call(self, text: str) -> None:
        """Say what is no call, without special tokens."""
        for token in self._hidden:
            text = text.replace(token, "")
        self._say(text)

    def _say(self, text: str) -> None:
        if self._trims:
            text = text.lstrip("\r\n")
            if not text:
                return
            self._trims = False
        text = self._blanks + text
        said = text.rstrip() if self._holds_blanks else text
        self._blanks = text[len(said) :]
        if said:
            self._is_at_start &= not said.strip()
            self._parts.append(ReasoningPart(said) if self._is_thinking else TextPart(said))

    @property
    def _holds_blanks(self) -> bool:
        """Whether blanks may turn out to stand before a mark."""
        may_open = bool(self._think_start) and self._is_at_start
        return self._is_thinking or bool(self._start) or may_open or bool(self._strong)
