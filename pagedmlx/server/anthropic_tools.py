"""Tools and their choice as Anthropic's API states them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedmlx.errors import InvalidRequestError
from pagedmlx.values import as_list, as_object, shown


def message_tools(value: object, *, strict: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Tools of Anthropic's API.

    Those that Anthropic's own servers run are left out, as long as others remain.

    Args:
        value: As the request has them.
        strict: Refuse what would be left out.

    Returns:
        The tools, and the types of the ones that are left out.

    Raises:
        InvalidRequestError: One is malformed, or none remains.
    """
    tools: list[dict[str, Any]] = []
    left_out: list[str] = []
    for index, tool in enumerate(as_list(value, "tools")):
        where = f"tools[{index}]"
        fields = as_object(tool, where)
        kind = fields.get("type")
        if kind not in (None, "custom"):
            if not isinstance(kind, str):
                raise InvalidRequestError(f"{where}.type", f"{shown(kind)} is not a string")
            left_out.append(kind)
            continue
        if fields.get("input_schema") is None:
            raise InvalidRequestError(f"{where}.input_schema", "is missing")
        given = {name: fields[name] for name in ("name", "description") if name in fields}
        given["parameters"] = fields["input_schema"]
        tools.append({"type": "function", "function": given})
    if left_out and (strict or not tools):
        raise InvalidRequestError(
            "tools", f"{left_out[0][:80]!r} is not supported", hint="what is: custom"
        )
    return tools, left_out


def message_tool_choice(value: object) -> tuple[object, bool]:
    """Which tool Anthropic's API is asked to call, and whether several calls may come.

    Raises:
        InvalidRequestError: It is malformed.
    """
    if value is None:
        return None, True
    fields = as_object(value, "tool_choice")
    kind = fields.get("type")
    _check_kind(fields, "tool_choice", ("auto", "any", "tool", "none"))
    alone = fields.get("disable_parallel_tool_use", False)
    if not isinstance(alone, bool):
        raise InvalidRequestError(
            "tool_choice.disable_parallel_tool_use", f"{shown(alone)} is not true or false"
        )
    if kind == "tool":
        return {"type": "function", "function": {"name": fields.get("name")}}, not alone
    return ("required" if kind == "any" else kind), not alone


def _check_kind(fields: Mapping[str, Any], where: str, kinds: tuple[str | None, ...]) -> None:
    kind = fields.get("type")
    if kind is not None and not isinstance(kind, str):
        raise InvalidRequestError(f"{where}.type", f"{shown(kind)} is not a string")
    if kind not in kinds:
        known = ", ".join(each for each in kinds if each is not None)
        raise InvalidRequestError(
            f"{where}.type", f"{shown(kind)} is not supported", hint=f"what is: {known}"
        )
