"""Tools, their choice and output formats as agents' APIs state them, in the chat API's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pagedmlx.errors import InvalidRequestError


def response_tools(value: object) -> list[dict[str, Any]]:
    """Tools of ``/v1/responses``.

    Raises:
        InvalidRequestError: One is malformed, or is run by OpenAI's own servers.
    """
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(_list(value, "tools")):
        fields = _object(tool, f"tools[{index}]")
        _check_kind(fields, f"tools[{index}]", ("function",))
        given = {name: fields[name] for name in _FUNCTION_FIELDS if fields.get(name) is not None}
        tools.append({"type": "function", "function": given})
    return tools


def response_tool_choice(value: object) -> object:
    """Which tool ``/v1/responses`` is asked to call.

    Raises:
        InvalidRequestError: It is malformed or not supported.
    """
    if not isinstance(value, Mapping):
        return value
    fields = cast("Mapping[str, Any]", value)
    _check_kind(fields, "tool_choice", ("function",))
    return {"type": "function", "function": {"name": fields.get("name")}}


def message_tools(value: object) -> list[dict[str, Any]]:
    """Tools of Anthropic's API.

    Raises:
        InvalidRequestError: One is malformed, or is one of Anthropic's own.
    """
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(_list(value, "tools")):
        where = f"tools[{index}]"
        fields = _object(tool, where)
        _check_kind(fields, where, (None, "custom"))
        if fields.get("input_schema") is None:
            raise InvalidRequestError(f"{where}.input_schema", "is missing")
        given = {name: fields[name] for name in _FUNCTION_FIELDS if fields.get(name) is not None}
        given["parameters"] = fields["input_schema"]
        tools.append({"type": "function", "function": given})
    return tools


def message_tool_choice(value: object) -> tuple[object, bool]:
    """Which tool Anthropic's API is asked to call, and whether several calls may come.

    Raises:
        InvalidRequestError: It is malformed.
    """
    if value is None:
        return None, True
    fields = _object(value, "tool_choice")
    kind = fields.get("type")
    _check_kind(fields, "tool_choice", ("auto", "any", "tool", "none"))
    alone = fields.get("disable_parallel_tool_use", False)
    if not isinstance(alone, bool):
        raise InvalidRequestError(
            "tool_choice.disable_parallel_tool_use", f"{_shown(alone)} is not true or false"
        )
    if kind == "tool":
        return {"type": "function", "function": {"name": fields.get("name")}}, not alone
    return ("required" if kind == "any" else kind), not alone


def response_format(value: object, where: str) -> dict[str, Any] | None:
    """What an answer must look like, as ``response_format`` of the chat API; None is plain text.

    Args:
        value: A format of ``/v1/responses`` or of Anthropic's API.
        where: Its place in the request.

    Raises:
        InvalidRequestError: It is malformed.
    """
    if value is None:
        return None
    fields = _object(value, where)
    kind = fields.get("type")
    _check_kind(fields, where, ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if not isinstance(fields.get("schema"), Mapping):
        raise InvalidRequestError(f"{where}.schema", "is missing or not an object")
    schema = {"name": fields.get("name") or "answer", "schema": fields["schema"]}
    return {"type": "json_schema", "json_schema": schema}


_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def _check_kind(fields: Mapping[str, Any], where: str, kinds: tuple[str | None, ...]) -> None:
    kind = fields.get("type")
    if kind is not None and not isinstance(kind, str):
        raise InvalidRequestError(f"{where}.type", f"{_shown(kind)} is not a string")
    if kind not in kinds:
        known = ", ".join(each for each in kinds if each is not None)
        raise InvalidRequestError(
            f"{where}.type", f"{_shown(kind)} is not supported", hint=f"what is: {known}"
        )


def _list(value: object, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequestError(where, f"{_shown(value)} is not a list")
    return cast("list[Any]", value)


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(where, f"{_shown(value)} is not an object")
    return cast("Mapping[str, Any]", value)


def _shown(value: object) -> str:
    return repr(value)[:80]
