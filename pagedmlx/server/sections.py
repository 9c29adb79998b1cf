"""Sections: an answer's parts gathered into what agents' APIs show one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pagedmlx.text.answer_parts import (
    AnswerPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
)


class Kind(StrEnum):
    """What a section is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Section:
    """One run of an answer.

    Attributes:
        index: 0 for the first one.
        kind: What it is.
        text: What was thought or said; of a call, its arguments as JSON text.
        call_id: Of a call.
        name: The tool that is called.
        is_whole: False if the end of the output has cut it off, or while it grows.
    """

    index: int
    kind: Kind
    text: str = ""
    call_id: str = ""
    name: str = ""
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """A section has begun; nothing is in it yet."""

    section: Section


@dataclass(frozen=True, slots=True)
class Grown:
    """The open section has become longer, by ``text``."""

    section: Section
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A section has got all that it will get."""

    section: Section


Change = Opened | Grown | Closed


@dataclass(slots=True)
class Sections:
    """Gathers parts; at most one section is open at a time.

    Attributes:
        closed: The finished ones, in order.
    """

    closed: list[Section] = field(default_factory=list[Section])
    _open: Section | None = None
    _texts: list[str] = field(default_factory=list[str])

    def add(self, parts: Iterable[AnswerPart]) -> Iterator[Change]:
        """Take in the next parts."""
        for part in parts:
            if isinstance(part, ToolCallBegin):
                yield from self._begin(Kind.CALL, part.call_id, part.name)
            elif isinstance(part, ReasoningPart):
                yield from self._say(Kind.REASONING, part.text)
            elif isinstance(part, TextPart):
                yield from self._say(Kind.TEXT, part.text)
            elif isinstance(part, ToolCallArguments):
                yield from self._grow(part.text)
            else:
                yield from self._close(is_whole=True)

    def finish(self, *, is_cut: bool) -> Iterator[Change]:
        """The output has ended; an answer of nothing at all becomes an empty text.

        Args:
            is_cut: Whether it would have gone on.
        """
        if self._open is None and not self.closed:
            yield from self._begin(Kind.TEXT)
        is_call = self._open is not None and self._open.kind is Kind.CALL
        yield from self._close(is_whole=not is_cut and not is_call)

    def _say(self, kind: Kind, text: str) -> Iterator[Change]:
        if not text:
            return
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        yield from self._grow(text)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Change]:
        yield from self._close(is_whole=True)
        self._open = Section(len(self.closed), kind, call_id=call_id, name=name)
        yield Opened(self._open)

    def _grow(self, text: str) -> Iterator[Change]:
        assert self._open is not None, "arguments without a call"
        if text:
            self._texts.append(text)
            yield Grown(self._open, text)

    def _close(self, *, is_whole: bool) -> Iterator[Change]:
        if self._open is None:
            return
        section = replace(self._open, text="".join(self._texts), is_whole=is_whole)
        self.closed.append(section)
        self._open = None
        self._texts.clear()
        yield Closed(section)
