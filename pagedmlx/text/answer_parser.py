"""AnswerParser: an answer's text, as it comes, to reasoning, content and calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from pagedmlx.text.answer_parts import (
    AnswerPart,
    AssistantMessage,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
)
from pagedmlx.text.answer_style import AnswerStyle, ToolSyntax
from pagedmlx.text.harmony import HarmonyParser
from pagedmlx.text.tagged_parser import TaggedParser

Tools = Sequence[Mapping[str, Any]]
"""What may be called, in OpenAI's form."""


class AnswerParser(Protocol):
    """Takes one answer apart; how its text is cut into pieces makes no difference.

    Nothing is ever lost: what looks like a call and is none comes out as text. Only marks, blank
    space beside them and special tokens are left out. A thought that the end cuts off is
    reasoning; a call that it cuts off has no ``ToolCallEnd``, or is text if its name isn't known
    by then.
    """

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        ...

    @property
    def has_tool_calls(self) -> bool:
        """Whether there are calls, all of them complete."""
        ...

    def add(self, text: str) -> list[AnswerPart]:
        """Take the next text; return what is certain now."""
        ...

    def finish(self) -> list[AnswerPart]:
        """The output has ended: return the rest."""
        ...


def answer_parser(
    style: AnswerStyle,
    *,
    tools: Tools = (),
    syntax: ToolSyntax | None = None,
    is_thinking: bool = False,
    max_calls: int | None = None,
) -> AnswerParser:
    """A parser for one answer.

    Args:
        style: How the model writes.
        tools: What it may call; without any, nothing is taken for a call.
        syntax: How it was told to write calls, if not in its own way.
        is_thinking: Whether the prompt has opened the reasoning.
        max_calls: Further calls are left out.
    """
    if style.is_harmony:
        return HarmonyParser(style, tools, max_calls=max_calls)
    return TaggedParser(
        style,
        (syntax or style.tools) if tools else None,
        tools,
        is_thinking=is_thinking,
        max_calls=max_calls,
    )


def parse_answer(parser: AnswerParser, text: str) -> list[AnswerPart]:
    """Take a whole answer apart, joined as ``join_parts`` does."""
    return join_parts([*parser.add(text), *parser.finish()])


def join_parts(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """The same parts, with neighbours of the same kind as one."""
    joined: list[AnswerPart] = []
    for key, group in groupby(parts, _key):
        kind = key[0]
        if kind is ReasoningPart or kind is TextPart:
            joined.append(kind("".join(part.text for part in group)))  # type: ignore[union-attr]
        elif kind is ToolCallArguments:
            text = "".join(part.text for part in group)  # type: ignore[union-attr]
            joined.append(ToolCallArguments(key[1], text))
        else:
            joined += group
    return joined


def to_message(parts: Sequence[AnswerPart]) -> AssistantMessage:
    """The message that the parts make."""
    begun = [part for part in parts if isinstance(part, ToolCallBegin)]
    texts = [""] * len(begun)
    for part in parts:
        if isinstance(part, ToolCallArguments):
            texts[part.index] += part.text
    return AssistantMessage(
        content="".join(part.text for part in parts if isinstance(part, TextPart)),
        reasoning="".join(part.text for part in parts if isinstance(part, ReasoningPart)),
        tool_calls=tuple(
            ToolCall(call.call_id, call.name, text) for call, text in zip(begun, texts, strict=True)
        ),
    )


def _key(part: AnswerPart) -> tuple[type[AnswerPart], int]:
    return type(part), getattr(part, "index", 0)
