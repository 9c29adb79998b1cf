"""Answers as models of many kinds write them, and tools for them to call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedmlx.engine.tool_syntax import tool_syntax
from pagedmlx.text.answer_parser import AnswerParser, join_parts, to_message
from pagedmlx.text.answer_parts import (
    AnswerPart,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from pagedmlx.text.answer_style import ToolSyntax, llama_syntax

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}
TOOLS: Any = (WEATHER, TIME)
ARGUMENTS = {"city": "Oslo", "days": 2}

CALLS = {
    "json_tools": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n'
        "</tool_call>"
    ),
    "llama": '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 2}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 2}',
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Oslo", "days": 2}<|tool_call_end|>'
        "<|tool_calls_section_end|>"
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm47": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
    ),
    "laguna": (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
    ),
    "longcat": (
        "<longcat_tool_call>get_weather<longcat_arg_key>city</longcat_arg_key>"
        "<longcat_arg_value>Oslo</longcat_arg_value><longcat_arg_key>days</longcat_arg_key>"
        "<longcat_arg_value>2</longcat_arg_value></longcat_tool_call>"
    ),
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>',
    "function_gemma": (
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:2}<end_function_call>"
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="integer"<|sep|>2<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "minicpm5": (
        '<function name="get_weather"><param name="city">Oslo</param>'
        '<param name="days">2</param></function>'
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>'
        '\n<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "muse_spark": (
        '<atem:function_calls>\n<atem:invoke name="get_weather">'
        '<atem:parameter name="city">Oslo</atem:parameter>'
        '<atem:parameter name="days">2</atem:parameter></atem:invoke>\n</atem:function_calls>'
    ),
    "pythonic": '<|tool_call_start|>[get_weather(city="Oslo", days=2)]<|tool_call_end|>',
}
"""The same call in every syntax, by the names of mlx-lm's parsers."""


def syntax_of(name: str) -> ToolSyntax:
    """The syntax of one of ``CALLS``."""
    found = llama_syntax() if name == "llama" else tool_syntax(name)
    assert found is not None
    return found


def in_pieces(parser: AnswerParser, pieces: Iterable[str]) -> list[AnswerPart]:
    """What a parser makes of a text that comes in pieces."""
    parts = [part for piece in pieces for part in parser.add(piece)]
    return join_parts([*parts, *parser.finish()])


def calls_of(parts: Sequence[AnswerPart]) -> tuple[ToolCall, ...]:
    """The calls among parts."""
    return to_message(parts).tool_calls


def plain(parts: Sequence[AnswerPart]) -> list[tuple[str, ...]]:
    """Parts without the ids, which are drawn."""
    shown: list[tuple[str, ...]] = []
    for part in parts:
        match part:
            case ReasoningPart(text):
                shown.append(("reasoning", text))
            case TextPart(text):
                shown.append(("text", text))
            case ToolCallBegin(index, _, name):
                shown.append(("call", str(index), name))
            case ToolCallArguments(index, text):
                shown.append(("arguments", str(index), text))
            case ToolCallEnd(index):
                shown.append(("end", str(index)))
    return shown


@dataclass(frozen=True)
class Call:
    """A call as a client has got it; its id is drawn and not compared."""

    call_id: str = field(compare=False)
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One choice as a client has got it."""

    content: str | None
    reasoning: str | None
    calls: tuple[Call, ...]
    finish_reason: str | None


def gather(answers: Iterable[Any]) -> list[Message]:
    """The choices of a whole chat completion, or of the chunks of a streamed one."""
    texts: dict[int, dict[str, str]] = {}
    calls: dict[int, dict[int, list[str]]] = {}
    reasons: dict[int, str] = {}
    for answer in answers:
        for choice in answer.choices:
            said = choice.delta if hasattr(choice, "delta") else choice.message
            told = texts.setdefault(choice.index, {"content": "", "reasoning_content": ""})
            for name in told:
                told[name] += getattr(said, name, None) or ""
            assert getattr(said, "reasoning", None) == getattr(said, "reasoning_content", None)
            listed = calls.setdefault(choice.index, {})
            for place, call in enumerate(said.tool_calls or ()):
                index = getattr(call, "index", None)
                index = place if index is None else index
                if call.id:
                    assert index == len(listed)
                    assert call.type == "function"
                    listed[index] = [call.id, call.function.name, ""]
                listed[index][2] += call.function.arguments or ""
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return [
        Message(
            content=texts[index]["content"] or (None if calls[index] else ""),
            reasoning=texts[index]["reasoning_content"] or None,
            calls=tuple(Call(*calls[index][place]) for place in sorted(calls[index])),
            finish_reason=reasons.get(index),
        )
        for index in sorted(texts)
    ]
