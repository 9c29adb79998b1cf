"""Chat messages as callers send them: checked, and brought to the one form that templates get."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagedmlx.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """Check a conversation and return it as templates expect it.

    The role ``developer`` becomes ``system``; content given as text parts becomes their joined
    text; null content beside an assistant's tool calls or reasoning becomes the empty string; the
    calls' arguments become JSON text; reasoning gets all the names that templates know it by;
    other keys are kept. The input isn't changed.

    Raises:
        InvalidRequestError: No messages, an unknown role, or content that isn't text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError(
            "messages",
            f"{_kind(messages)} instead of a list of messages",
            hint='A message is an object such as {"role": "user", "content": "Hello"}.',
        )
    if not messages:
        raise InvalidRequestError("messages", "the list is empty, at least one is needed")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def merge_system(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """A normalized conversation with its system message in front of the first user message.

    Returns:
        None unless it begins with system messages and then one of a user.
    """
    roles = [message["role"] for message in conversation]
    num_merged = roles.index("user") + 1 if "user" in roles else 0
    if num_merged < 2 or set(roles[: num_merged - 1]) != {"system"}:
        return None
    texts = [message["content"] for message in conversation[:num_merged]]
    merged = {**conversation[num_merged - 1], "content": "\n\n".join(filter(None, texts))}
    return [merged, *map(dict, conversation[num_merged:])]


def with_parsed_arguments(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A normalized conversation with the arguments of tool calls as mappings.

    Text that isn't a JSON object is kept as it came, under the key ``arguments``.
    """
    return [
        {**message, "tool_calls": [_parsed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in conversation
    ]


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _parse(function["arguments"])}}


def _parse(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def _normalize(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(where, f"{_kind(message)} instead of an object")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role", f"{role!r} is not a role", hint=f"Roles: {', '.join(ROLES)}."
        )
    result = {str(key): value for key, value in message.items() if value is not None}
    result["role"] = "system" if role == "developer" else role
    if message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
        result.setdefault("content", "")
    if role == "assistant":
        result |= _reasoning(message, where)
        if "reasoning_content" in result:
            result.setdefault("content", "")
    result["content"] = _content(result.get("content"), f"{where}.content")
    return result


def _reasoning(message: Mapping[str, Any], where: str) -> dict[str, str]:
    for key in ("reasoning_content", "reasoning"):
        text = message.get(key)
        if text is not None and not isinstance(text, str):
            raise InvalidRequestError(f"{where}.{key}", f"{_kind(text)} instead of text")
        if text:
            names = ["reasoning_content", "reasoning"]
            # With both of these the template of gpt-oss takes no thoughts.
            if not (message.get("content") and message.get("tool_calls")):
                names.append("thinking")
            return dict.fromkeys(names, text)
    return {}


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequestError(where, "missing or null", hint="Give the text as a string.")
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(where, f"{_kind(content)} instead of text or a list of parts")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(where, f"{_kind(part)} instead of an object")
    if part.get("type") != "text":
        raise InvalidRequestError(
            f"{where}.type",
            f"{part.get('type')!r} can't be read by this model",
            hint="Only parts of the type 'text' are taken.",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text", f"{_kind(text)} instead of text")
    return text


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError(where, f"{_kind(calls)} instead of a list of calls")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequestError(where, "not an object with a function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{where}.function.name", f"{name!r} is not a name")
    text = _argument_text(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": text}}


def _argument_text(arguments: object, where: str) -> str:
    if arguments is None:
        return "{}"
    if isinstance(arguments, Mapping):
        return json.dumps(dict(arguments), ensure_ascii=False)
    if not isinstance(arguments, str):
        raise InvalidRequestError(where, f"{_kind(arguments)} instead of JSON text or an object")
    return arguments if arguments.strip() else "{}"


def _kind(value: object) -> str:
    return "null" if value is None else f"a value of type {type(value).__name__}"
