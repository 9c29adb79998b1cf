"""Tells a model's reasoning from its answer, also while both are being written."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPEN, _CLOSE = "<think>", "</think>"
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n]*\n(.*?)(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a text is made of.

    Attributes:
        reasoning: Between the tags at the beginning, without them.
        answer: What comes after them.
        is_thinking: Whether the reasoning has not ended.
    """

    reasoning: str
    answer: str
    is_thinking: bool = False


def split_reasoning(text: str) -> Parts:
    """Take apart a text; templates may open the reasoning in the prompt: its end counts then."""
    start = text.lstrip()
    if start and _OPEN.startswith(start) and start != _OPEN:
        return Parts("", "", is_thinking=True)
    if start.startswith(_OPEN):
        body = start.removeprefix(_OPEN)
        reasoning, closed, answer = body.partition(_CLOSE)
        return Parts(reasoning.strip("\n"), answer.lstrip("\n"), is_thinking=not closed)
    reasoning, closed, answer = text.partition(_CLOSE)
    if closed:
        return Parts(reasoning.strip("\n"), answer.lstrip("\n"))
    return Parts("", text)


def code_blocks(text: str) -> list[str]:
    """The contents of the fenced code blocks of a Markdown text; the last one may be open."""
    return [match[2].rstrip("\n") for match in _FENCE.finditer(text)]
