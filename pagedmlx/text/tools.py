"""Tools as callers state them, checked; and told to models whose templates know none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from pagedmlx.errors import InvalidRequestError
from pagedmlx.values import as_object, shown

MAX_TOOLS = 512
"""Most tools in one request."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_TOOL_KEYS = ("tool_calls", "tool_call_id")
_INTRODUCTION = """\
# Tools

You can call functions. These are there, one on each line:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as a JSON object between tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
</tool_call>
Several calls may follow one another. Results come in the next message, between <tool_response> \
tags. Where no function helps, answer in plain text."""


class ToolMode(StrEnum):
    """Whether an answer may call tools."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether and which tools are called.

    Attributes:
        mode: The model decides, or it must not, or it must.
        names: Only these can be called; empty is all of them.
    """

    mode: ToolMode = ToolMode.AUTO
    names: tuple[str, ...] = ()


def check_tools(value: object) -> tuple[dict[str, Any], ...]:
    """Check tools in OpenAI's form.

    Returns:
        Name, description and parameters of each, in the same form.

    Raises:
        InvalidRequestError: One is malformed, of an unknown type, or named like another.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise InvalidRequestError("tools", f"{shown(value)} is not a list")
    given = cast("Sequence[Any]", value)
    if len(given) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"{len(given)} of them, at most {MAX_TOOLS}")
    tools: dict[str, dict[str, Any]] = {}
    for index, each in enumerate(given):
        function = _function(each, f"tools[{index}]")
        if function["name"] in tools:
            raise InvalidRequestError(
                f"tools[{index}].function.name", f"there are two of {function['name']!r}"
            )
        tools[function["name"]] = {"type": "function", "function": function}
    return tuple(tools.values())


def check_tool_choice(value: object, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Check a choice among tools in OpenAI's form.

    Args:
        value: ``auto``, ``none``, ``required``, a function, or ``allowed_tools``; None is auto.
        tools: Those of the request, checked.

    Raises:
        InvalidRequestError: It is malformed, or there is no such tool.
    """
    if value is None:
        return ToolChoice()
    choice = _choice(value)
    known = {tool["function"]["name"] for tool in tools}
    for name in choice.names:
        if name not in known:
            raise InvalidRequestError("tool_choice", f"there is no tool {name[:80]!r}")
    if choice.mode is ToolMode.REQUIRED and not tools:
        raise InvalidRequestError("tool_choice", "'required', but there are no tools")
    return choice


def mentions_tools(messages: object) -> bool:
    """Whether a conversation, which may be malformed, has calls of tools or results."""
    return isinstance(messages, list | tuple) and any(
        isinstance(message, Mapping)
        and (message.get("tool_calls") or message.get("role") == "tool")
        for message in cast("Sequence[Any]", messages)
    )


def tell_of_tools(
    conversation: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A normalized conversation for a template that knows no tools.

    They are described in the system message; calls and results become text.
    """
    told: list[dict[str, Any]] = []
    for message in conversation:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if told and told[-1]["role"] == "user":
                # Many templates refuse two messages of the same role.
                content = f"{told.pop()['content']}\n{content}"
        elif message.get("tool_calls"):
            calls = "\n".join(_written(call["function"]) for call in message["tool_calls"])
            content = f"{content}\n\n{calls}" if content else calls
        elif role == "user" and told and _is_result(told[-1]):
            content = f"{told.pop()['content']}\n\n{content}"
        kept = {key: value for key, value in message.items() if key not in _TOOL_KEYS}
        told.append({**kept, "role": role, "content": content})
    if tools:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        introduction = _INTRODUCTION.format(tools=lines)
        if told[0]["role"] == "system":
            told[0]["content"] += f"\n\n{introduction}"
        else:
            told.insert(0, {"role": "system", "content": introduction})
    return told


def _is_result(message: Mapping[str, Any]) -> bool:
    return message["role"] == "user" and message["content"].endswith("</tool_response>")


def _written(function: Mapping[str, Any]) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {function["arguments"]}}}\n</tool_call>'


def _function(tool: object, where: str) -> dict[str, Any]:
    fields = as_object(tool, where)
    kind = fields.get("type")
    if kind != "function":
        raise InvalidRequestError(
            f"{where}.type", f"{shown(kind)} is not supported", hint="what is: function"
        )
    function = as_object(fields.get("function"), f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{where}.function.name",
            f"{shown(name)} is not 1 to 128 of the characters a-z, A-Z, 0-9, _, . and -",
        )
    checked: dict[str, Any] = {"name": name}
    description = function.get("description")
    if description is not None:
        if not isinstance(description, str):
            raise InvalidRequestError(
                f"{where}.function.description", f"{shown(description)} is not text"
            )
        checked["description"] = description
    checked["parameters"] = _parameters(function.get("parameters"), f"{where}.function.parameters")
    return checked


def _parameters(value: object, where: str) -> dict[str, Any]:
    if value is None:
        return {"type": "object", "properties": {}}
    schema = dict(as_object(value, where))
    if schema.setdefault("type", "object") != "object":
        raise InvalidRequestError(f"{where}.type", f"{shown(schema['type'])} must be 'object'")
    # Templates go through both without looking.
    properties = schema.setdefault("properties", {})
    if not isinstance(properties, Mapping):
        raise InvalidRequestError(f"{where}.properties", f"{shown(properties)} is not an object")
    for name, each in cast("Mapping[str, Any]", properties).items():
        if not isinstance(each, Mapping | bool):
            raise InvalidRequestError(
                f"{where}.properties", f"{shown(each)} is no schema, of {name[:80]!r}"
            )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise InvalidRequestError(f"{where}.required", f"{shown(required)} is no list of names")
    return schema


def _choice(value: object) -> ToolChoice:
    if isinstance(value, str):
        if value not in list(ToolMode):
            raise InvalidRequestError(
                "tool_choice",
                f"{shown(value)} is not supported",
                hint="what is: auto, none, required, or an object that names a function",
            )
        return ToolChoice(ToolMode(value))
    fields = as_object(value, "tool_choice")
    if fields.get("type") == "function":
        return ToolChoice(ToolMode.REQUIRED, (_named(fields, "tool_choice"),))
    if fields.get("type") != "allowed_tools":
        raise InvalidRequestError("tool_choice.type", f"{shown(fields.get('type'))} is unknown")
    allowed = as_object(fields.get("allowed_tools"), "tool_choice.allowed_tools")
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise InvalidRequestError(
            "tool_choice.allowed_tools", "needs a mode, auto or required, and a list of tools"
        )
    names = [
        _named(as_object(tool, f"{place}[{index}]"), f"{place}[{index}]")
        for place in ("tool_choice.allowed_tools.tools",)
        for index, tool in enumerate(cast("list[Any]", tools))
    ]
    return ToolChoice(ToolMode(mode), tuple(dict.fromkeys(names)))


def _named(fields: Mapping[str, Any], where: str) -> str:
    name = as_object(fields.get("function"), f"{where}.function").get("name")
    if not isinstance(name, str):
        raise InvalidRequestError(f"{where}.function.name", f"{shown(name)} is not a name")
    return name
