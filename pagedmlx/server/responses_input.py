"""The input of ``/v1/responses`` as a conversation in the chat API's form."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.responses_tools import custom_arguments, model_name
from pagedmlx.values import text_of

MAX_ITEMS = 10_000
"""Most items of a conversation."""

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def read_items(
    value: object, look_up: Callable[[str, str], dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """The ``input`` of a request as a list of items.

    Args:
        value: As the request has it: text or items.
        look_up: Finds the item that an ``item_reference`` means, by its id and the field's name.

    Raises:
        InvalidRequestError: It is neither.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("input", "must be text or a list of items, not empty")
    items = cast("list[Any]", value)
    if len(items) > MAX_ITEMS:
        raise InvalidRequestError("input", f"{len(items)} items, at most {MAX_ITEMS}")
    return [_item(item, f"input[{index}]", look_up) for index, item in enumerate(items)]


def _item(
    item: object, where: str, look_up: Callable[[str, str], dict[str, Any]] | None
) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise InvalidRequestError(where, "is not an object")
    fields = {**cast("Mapping[str, Any]", item)}
    if fields.get("type") is None and "role" in fields:
        fields["type"] = "message"
    # Clients may leave out the type of a reference, which is nothing but an id.
    if fields.get("type") == "item_reference" or fields.keys() == {"id"}:
        item_id = text_of(fields, "id", where)
        if look_up is None:
            raise InvalidRequestError(f"{where}.id", f"there is no item {item_id[:80]!r}")
        return look_up(item_id, f"{where}.id")
    return fields


def to_messages(
    instructions: str | None, history: Sequence[dict[str, Any]], items: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Messages of the chat API.

    What one turn of the assistant consists of, its reasoning, text and calls, becomes one message.

    Args:
        instructions: A system message in front.
        history: Items of a stored conversation.
        items: Those of the request.

    Raises:
        InvalidRequestError: An item is malformed, or of a kind that this server doesn't know.
    """
    conversation = _Conversation()
    if instructions:
        conversation.add("system", instructions)
    for index, item in enumerate([*history, *items], -len(history)):
        where = f"input[{index}]"
        kind = item.get("type")
        if kind == "message":
            _add_message(conversation, item, where)
        elif kind == "reasoning":
            conversation.think(_reasoning(item, where))
        elif kind == "function_call":
            conversation.call(item, where, text_of(item, "arguments", where))
        elif kind == "custom_tool_call":
            conversation.call(item, where, custom_arguments(text_of(item, "input", where)))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call_id = text_of(item, "call_id", where)
            content = _content(item.get("output"), f"{where}.output")
            conversation.add("tool", content, tool_call_id=call_id)
        else:
            raise InvalidRequestError(
                f"{where}.type",
                f"{str(kind)[:80]!r} is not supported",
                hint="what is: messages, reasoning, calls of functions and their outputs",
            )
    return conversation.messages


@dataclass(slots=True)
class _Conversation:
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _is_open: bool = False

    def add(self, role: str, content: str, **others: Any) -> None:
        self.messages.append({"role": role, "content": content, **others})
        self._is_open = role == "assistant"

    def say(self, text: str) -> None:
        last = self._turn()
        if last["content"] and "tool_calls" not in last:
            self.add("assistant", text)
        else:
            last["content"] += text

    def think(self, text: str) -> None:
        last = self._turn()
        if last["content"] or "tool_calls" in last:
            self.add("assistant", "")
            last = self.messages[-1]
        if text:
            last["reasoning_content"] = last.get("reasoning_content", "") + text

    def call(self, item: Mapping[str, Any], where: str, arguments: str) -> None:
        name = model_name(text_of(item, "name", where), item.get("namespace"))
        function = {"name": name, "arguments": arguments}
        call = {"id": text_of(item, "call_id", where), "type": "function", "function": function}
        self._turn().setdefault("tool_calls", []).append(call)

    def _turn(self) -> dict[str, Any]:
        if not self._is_open:
            self.add("assistant", "")
        return self.messages[-1]


def _add_message(conversation: _Conversation, item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequestError(
            f"{where}.role",
            f"{str(role)[:80]!r} is not a role",
            hint="user, assistant, system or developer",
        )
    content = _content(item.get("content"), f"{where}.content")
    if role == "assistant":
        conversation.say(content)
    else:
        conversation.add(role, content)


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(where, "must be text or a list of parts")
    parts = cast("list[Any]", content)
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(parts))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(where, "is not an object")
    fields = cast("Mapping[str, Any]", part)
    kind = str(fields.get("type"))[:80]
    if kind not in _TEXT_PARTS:
        raise InvalidRequestError(
            f"{where}.type", f"{kind!r} can't be read by this model", hint="send text only"
        )
    return text_of(fields, _TEXT_PARTS[kind], where)


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """What was thought; clients that keep no plain reasoning send the sealed one back."""
    content = item.get("content") or ()
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"{where}.content", "is not a list")
    texts: list[str] = []
    for index, part in enumerate(cast("list[Any]", content)):
        if not isinstance(part, Mapping):
            raise InvalidRequestError(f"{where}.content[{index}]", "is not an object")
        texts.append(text_of(cast("Mapping[str, Any]", part), "text", f"{where}.content[{index}]"))
    if texts:
        return "".join(texts)
    sealed = item.get("encrypted_content")
    return unseal(sealed) if isinstance(sealed, str) else ""


_SEAL = "pagedmlx:"


def seal(reasoning: str) -> str:
    """Reasoning for ``encrypted_content``: not secret, but nothing that a client should show."""
    return _SEAL + base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def unseal(sealed: str) -> str:
    """The reasoning; of another server's, which can't be read, the empty text."""
    if not sealed.startswith(_SEAL):
        return ""
    try:
        data = base64.b64decode(sealed.removeprefix(_SEAL), validate=True)
        return data.decode("utf-8")
    except (binascii.Error, ValueError):
        return ""
