"""Tools of ``/v1/responses``: functions, those in namespaces, and ones that take plain text.

To the model all of them are functions. Tools that OpenAI's own servers run are left out, as long as
others remain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pagedmlx.errors import InvalidRequestError
from pagedmlx.values import as_list, as_object, shown, text_of

_FUNCTION_FIELDS = ("name", "description", "parameters")
_INPUT = "input"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a function of the model is in the request.

    Attributes:
        name: Its name there.
        namespace: The namespace that it belongs to; empty if it's in none.
        is_custom: Whether it takes plain text instead of JSON.
    """

    name: str
    namespace: str = ""
    is_custom: bool = False


@dataclass(slots=True)
class ResponseTools:
    """The tools of a request.

    Attributes:
        functions: In the chat API's form.
        origins: What they are in the request, by the names that the model has for them.
        left_out: Types of tools that it doesn't get.
    """

    functions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    origins: dict[str, Origin] = field(default_factory=dict[str, Origin])
    left_out: list[str] = field(default_factory=list[str])

    def item(self, name: str, call_id: str, arguments: str) -> dict[str, Any]:
        """A call as an item, without its id and status."""
        origin = self.origins.get(name) or Origin(name)
        item = {"call_id": call_id, "name": origin.name}
        if origin.namespace:
            item["namespace"] = origin.namespace
        if origin.is_custom:
            return {"type": "custom_tool_call", **item, "input": custom_input(arguments)}
        return {"type": "function_call", **item, "arguments": arguments}

    def is_custom(self, name: str) -> bool:
        """Whether a function takes plain text in the request."""
        return name in self.origins and self.origins[name].is_custom


def model_name(name: str, namespace: object) -> str:
    """The name that the model has for a tool."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def custom_arguments(text: str) -> str:
    """The arguments of a tool that takes plain text, as the model has them."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The plain text; of arguments that are cut off, what is there."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def read_tools(value: object, *, strict: bool) -> ResponseTools:
    """Read the tools of a request.

    Args:
        value: As the request has them.
        strict: Refuse what would be left out.

    Raises:
        InvalidRequestError: One is malformed, or all of them are run by OpenAI's own servers.
    """
    found = ResponseTools()
    for index, tool in enumerate(as_list(value, "tools")):
        _read(tool, f"tools[{index}]", found)
    if found.left_out and (strict or not found.functions):
        raise InvalidRequestError(
            "tools",
            f"{found.left_out[0][:80]!r} is not supported",
            hint="what is: function, custom and namespace",
        )
    return found


def _read(tool: object, where: str, found: ResponseTools, namespace: str = "") -> None:
    fields = as_object(tool, where)
    kind = text_of(fields, "type", where)
    if kind == "namespace" and not namespace:
        inner = text_of(fields, "name", where)
        for index, each in enumerate(as_list(fields.get("tools"), f"{where}.tools")):
            _read(each, f"{where}.tools[{index}]", found, inner)
    elif kind in ("function", "custom"):
        name = text_of(fields, "name", where)
        known = model_name(name, namespace)
        function = {key: fields[key] for key in _FUNCTION_FIELDS if fields.get(key) is not None}
        if kind == "custom":
            function |= _as_function(fields, where)
        found.functions.append({"type": "function", "function": function | {"name": known}})
        found.origins[known] = Origin(name, namespace, kind == "custom")
    else:
        found.left_out.append(kind)


def _as_function(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One text as the only parameter; a grammar of it goes into the description."""
    help = fields.get("description")
    lines = [help] if isinstance(help, str) else []
    form = fields.get("format")
    if form is not None and as_object(form, f"{where}.format").get("type") == "grammar":
        syntax, definition = (
            text_of(form, key, f"{where}.format") for key in ("syntax", "definition")
        )
        lines.append(f"The input must match this {syntax} grammar:\n{definition}")
    schema = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
    return {"description": "\n\n".join(lines), "parameters": schema}


def read_tool_choice(value: object) -> object:
    """Which tool is asked for, in the chat API's form.

    Raises:
        InvalidRequestError: It is malformed or not supported.
    """
    if not isinstance(value, Mapping):
        return value
    fields = cast("Mapping[str, Any]", value)
    if fields.get("type") != "allowed_tools":
        return _choice(fields, "tool_choice")
    where = "tool_choice.tools"
    allowed = [
        _choice(as_object(tool, f"{where}[{index}]"), f"{where}[{index}]")
        for index, tool in enumerate(as_list(fields.get("tools"), where))
    ]
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": fields.get("mode"), "tools": allowed},
    }


def _choice(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = fields.get("type")
    if kind not in ("function", "custom"):
        raise InvalidRequestError(
            f"{where}.type", f"{shown(kind)} is not supported", hint="what is: function, custom"
        )
    name = model_name(text_of(fields, "name", where), fields.get("namespace"))
    return {"type": "function", "function": {"name": name}}
