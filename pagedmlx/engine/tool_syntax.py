"""The ways in which models write calls of tools: those of mlx-lm's parsers, and Llama's own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagedmlx.models.tool_parsers import ToolParser, infer_tool_parser, load_tool_parser
from pagedmlx.text.answer_style import ToolSyntax, json_syntax, llama_syntax

_MISTRAL_HEADER = re.compile(
    r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?\[ARGS\]\s*(?=\{)"
)
_KIMI_HEADER = re.compile(
    r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
_ARGUMENT_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_TOKENS = {
    "function_gemma": ("<escape>",),
    "gemma4": ('<|"|>',),
    "glm47": _ARGUMENT_TAGS,
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "laguna": _ARGUMENT_TAGS,
    "longcat": tuple(tag.replace("arg_", "longcat_arg_") for tag in _ARGUMENT_TAGS),
}
"""Marks within calls that may be special tokens."""

_ACCEPTS_ANYTHING = ("glm47", "laguna", "minicpm5")


def find_tool_syntax(template: str, tokenizer: Any) -> ToolSyntax | None:
    """How a model writes calls.

    Args:
        template: Its chat template, which knows tools.
        tokenizer: The tokenizer of transformers.

    Returns:
        None if nobody knows.
    """
    name = infer_tool_parser(template, tokenizer)
    if name is None:
        is_llama = '"parameters": dictionary of argument name' in template
        return llama_syntax() if is_llama else None
    syntax = tool_syntax(name)
    if name == "mistral" and syntax is not None and "[ARGS]" not in template:
        # Older ones put all calls into one list.
        frame = ('[TOOL_CALLS] [{"name": "NAME", "arguments": ', "}]")
        return replace(syntax, frame=frame, separator=None)
    return syntax


def tool_syntax(name: str) -> ToolSyntax | None:
    """What one of mlx-lm's parsers reads; None if it has none of this name."""
    if name == "json_tools":
        return json_syntax()
    parser = load_tool_parser(name)
    if parser is None:
        return None
    parse = _ParseCalls(parser, known_only=name in _ACCEPTS_ANYTHING)
    if name == "mistral":
        return ToolSyntax(
            parser.start,
            "",
            parse,
            header=_MISTRAL_HEADER,
            tokens=("[ARGS]", "[CALL_ID]"),
            id_length=9,
            frame=("[TOOL_CALLS]NAME[ARGS]", ""),
            separator="",
        )
    if name == "kimi_k2":
        return ToolSyntax(
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            parse,
            header=_KIMI_HEADER,
            dropped=(parser.start, parser.end),
            tokens=("<|tool_call_argument_begin|>",),
            frame=(
                f"{parser.start}<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
                f"<|tool_call_end|>{parser.end}",
            ),
            separator=None,
        )
    return ToolSyntax(
        parser.start,
        parser.end,
        parse,
        tokens=_TOKENS.get(name, ()),
        is_xml=name == "qwen3_coder",
    )


class _ParseCalls:
    """One of mlx-lm's parsers, always giving a list.

    Args:
        parser: The parser.
        known_only: It takes anything for a call; those of tools that exist count.
    """

    def __init__(self, parser: ToolParser, *, known_only: bool) -> None:
        self._parse = parser.parse
        self._known_only = known_only

    def __call__(
        self, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        found = self._parse(text.strip(), list(tools))
        calls = found if isinstance(found, list) else [found]
        names = {tool["function"]["name"] for tool in tools}
        if self._known_only and any(call["name"] not in names for call in calls):
            raise ValueError("no call of a tool that exists")
        return calls
