"""Messages of Anthropic's API as a conversation in the chat API's form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pagedmlx.errors import InvalidRequestError
from pagedmlx.values import as_object, text_of

_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)
_BETWEEN = "\n\n"


def to_messages(system: object, messages: object) -> list[dict[str, Any]]:
    """Messages of the chat API.

    Raises:
        InvalidRequestError: Something is malformed, or can't be read by a model of text.
    """
    found = list(_system(system))
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages", "must be a list of messages, not empty")
    for index, message in enumerate(cast("list[Any]", messages)):
        found += _message(as_object(message, f"messages[{index}]"), f"messages[{index}]")
    if found[-1]["role"] == "assistant":
        raise InvalidRequestError(
            f"messages[{len(cast('list[Any]', messages)) - 1}]",
            "is the assistant's; answers can't be begun by the client",
            hint="end with a user message",
        )
    return found


def _system(system: object) -> Iterator[dict[str, Any]]:
    if system is None:
        return
    texts = [system] if isinstance(system, str) else _texts(system, "system")
    # Claude Code's note to Anthropic's accounting differs each time: no text for a model, and
    # the end of every shared prefix.
    text = _BETWEEN.join(filter(None, (_BILLING.sub("", each) for each in texts)))
    if text:
        yield {"role": "system", "content": text}


def _message(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequestError(
            f"{where}.role", f"{str(role)[:80]!r} is not a role", hint="user or assistant"
        )
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _blocks(content, f"{where}.content")
    return _assistant(blocks) if role == "assistant" else _user(role, blocks)


def _user(role: str, blocks: Sequence[tuple[Mapping[str, Any], str]]) -> list[dict[str, Any]]:
    """The results of tools, each a message of its own, and then what the user says."""
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for block, where in blocks:
        if block.get("type") == "tool_result":
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": text_of(block, "tool_use_id", where),
                    "content": _result(block, where),
                }
            )
        else:
            texts.append(_text_of(block, where))
    if texts or not results:
        results.append({"role": role, "content": _BETWEEN.join(texts)})
    return results


def _assistant(blocks: Sequence[tuple[Mapping[str, Any], str]]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    thought: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, where in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thought.append(text_of(block, "thinking", where))
        elif kind == "redacted_thinking":
            continue  # another server's; nobody can read it here
        elif kind == "tool_use":
            calls.append(_call(block, where))
        else:
            message["content"] += _text_of(block, where)
    if any(thought):
        message["reasoning_content"] = "".join(thought)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = json.dumps(as_object(block.get("input"), f"{where}.input"), ensure_ascii=False)
    return {
        "id": text_of(block, "id", where),
        "type": "function",
        "function": {"name": text_of(block, "name", where), "arguments": arguments},
    }


def _result(block: Mapping[str, Any], where: str) -> str:
    content = block.get("content")
    if isinstance(content, str):
        text = content
    else:
        text = _BETWEEN.join(_texts(content or [], f"{where}.content"))
    # Templates know of no failed calls, so the text must tell; most tools say it by themselves.
    if block.get("is_error") is True and "error" not in text[:64].lower():
        text = f"Error: {text}"
    return text


def _texts(content: object, where: str) -> list[str]:
    return [_text_of(block, place) for block, place in _blocks(content, where)]


def _blocks(content: object, where: str) -> list[tuple[Mapping[str, Any], str]]:
    if not isinstance(content, list):
        raise InvalidRequestError(where, "must be text or a list of blocks")
    places = [f"{where}[{index}]" for index in range(len(cast("list[Any]", content)))]
    return [
        (as_object(block, place), place)
        for block, place in zip(cast("list[Any]", content), places, strict=True)
    ]


def _text_of(block: Mapping[str, Any], where: str) -> str:
    kind = block.get("type")
    if kind != "text":
        raise InvalidRequestError(
            f"{where}.type",
            f"{str(kind)[:80]!r} can't be read by this model",
            hint="text, tool_use, tool_result and thinking are taken, each in its place",
        )
    return text_of(block, "text", where)
