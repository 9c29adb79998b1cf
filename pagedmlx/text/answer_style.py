"""How a model writes its answers: the marks around reasoning and around calls of tools.

Found once, when a model is loaded, from its chat template and its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedmlx.text.call_json import JSON_CALL, parse_json_calls

ParseCalls = Callable[[str, Sequence[Mapping[str, Any]]], Sequence[Mapping[str, Any]]]
"""What stands between the marks of a call, and the tools, to objects with ``name`` and
``arguments``; it raises whatever it likes if that is no call."""

_THINK_TAGS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")
HARMONY_TOKENS = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
"""Marks of answers that are messages of several channels."""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a model writes a call of a tool.

    Attributes:
        start: Mark before a call.
        end: Mark after it; empty if there is none.
        parse: Reads what is between them.
        header: What comes before the arguments if these are JSON text, with the groups ``name``
            and perhaps ``id``; then they are passed on as they are written. The name may be a
            JSON string.
        closes: What closes a call behind such arguments, before the end mark.
        keeps_start: Whether ``start`` is the beginning of the call itself; it counts at the
            beginning of an answer only.
        dropped: Marks around several calls, which say nothing.
        tokens: Further marks within calls.
        id_length: Length of the ids that the template takes; 0 takes any.
        frame: What stands around the arguments of a call if these are JSON, from ``start`` to
            ``end``; NAME is the tool's. None if there is no such form.
        separator: Between two calls; None if only one can be made.
        is_xml: Whether a call is written as Qwen3-Coder does: a tag for each argument.
    """

    start: str
    end: str
    parse: ParseCalls
    header: re.Pattern[str] | None = None
    closes: str = ""
    keeps_start: bool = False
    dropped: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    id_length: int = 0
    frame: tuple[str, str] | None = None
    separator: str | None = "\n"
    is_xml: bool = False


def json_syntax() -> ToolSyntax:
    """JSON objects between ``<tool_call>`` tags."""
    return ToolSyntax(
        "<tool_call>",
        "</tool_call>",
        parse_json_calls,
        header=JSON_CALL,
        closes="}",
        frame=('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    )


def llama_syntax() -> ToolSyntax:
    """A JSON object that is the whole answer, as Llama 3 was taught."""
    return ToolSyntax(
        '{"name"',
        "",
        parse_json_calls,
        header=JSON_CALL,
        closes="}",
        keeps_start=True,
        dropped=("<|python_tag|>",),
        frame=('{"name": "NAME", "parameters": ', "}"),
        separator=None,
    )


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """How one model writes.

    Attributes:
        think: The marks around its reasoning, or None if it doesn't reason.
        tools: How it writes calls; None if its template doesn't know tools, or in a way that
            nobody can read: then it is told of them in the generic way.
        is_harmony: Answers are messages of several channels, as gpt-oss writes them.
        dropped: Marks that say nothing.
        control: Special tokens that are marks, or parts of marks: they are needed to read an
            answer, and never shown.
        switches: Variables of the template that are about reasoning.
    """

    think: tuple[str, str] | None = None
    tools: ToolSyntax | None = None
    is_harmony: bool = False
    dropped: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    switches: frozenset[str] = frozenset()

    @property
    def reasons(self) -> bool:
        """Whether an answer may have reasoning that can be told apart."""
        return self.is_harmony or self.think is not None


def find_style(
    template: str,
    special_tokens: Sequence[str],
    has_token: Callable[[str], bool],
    find_syntax: Callable[[str], ToolSyntax | None],
) -> AnswerStyle:
    """Find out how a model writes.

    Args:
        template: Its chat template.
        special_tokens: Spellings of its special tokens.
        has_token: Whether it has a token of this spelling.
        find_syntax: How calls are written by a template that knows tools.
    """
    is_harmony = all(map(has_token, HARMONY_TOKENS)) and "<|channel|>" in template
    code = _code(template)
    switches = frozenset(name for name in _SWITCHES if _names(code, name))
    if is_harmony:
        return AnswerStyle(is_harmony=True, control=HARMONY_TOKENS, switches=switches)
    tools = find_syntax(template) if _names(code, "tools") else None
    think, dropped = _find_think(template, has_token)
    generic = json_syntax()
    marks = (*(think or ()), *dropped, generic.start, generic.end)
    if tools is not None:
        marks += (tools.start, tools.end, *tools.dropped, *tools.tokens)
    control = tuple(
        token
        for token in special_tokens
        if len(token.strip()) > 1 and any(token in mark for mark in marks)
    )
    return AnswerStyle(
        think=think, tools=tools, dropped=dropped, control=control, switches=switches
    )


def _code(template: str) -> str:
    """What is code in a template, without its strings."""
    code = " ".join(re.findall(r"\{[%{](.*?)[%}]\}", template, re.DOTALL))
    return re.sub(r"'[^']*'|\"[^\"]*\"", "", code)


def _names(code: str, variable: str) -> bool:
    return re.search(rf"(?<![\w.]){variable}\b", code) is not None


def _find_think(
    template: str, has_token: Callable[[str], bool]
) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    known = [tags for tags in _THINK_TAGS if all(map(has_token, tags))]
    if known:
        return known[0], ()
    if has_token("<|channel>") and has_token("<channel|>"):
        return ("<|channel>thought", "<channel|>"), ()
    if all(map(has_token, _XTML)):
        return ("<|open|>think<|sep|>", "<|close|>think<|sep|>"), (
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
        )
    written = [tags for tags in _THINK_TAGS if all(tag in template for tag in tags)]
    return (written[0] if written else None), ()
