"""The shape that an answer must have, as OpenAI, vLLM and llama.cpp let requests ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedmlx.core.structured import MAX_JSON_DEPTH, StructuredOutputs, is_deeper
from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.fields import renamed_error
from pagedmlx.values import as_object, shown

_KINDS: Mapping[str, str] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
_OTHERS: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
_SWITCHES = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")
# Schemas within a schema whose objects are whole by themselves.
_NAMED_SCHEMAS = ("properties", "$defs", "definitions")
_LISTED_SCHEMAS = ("anyOf", "oneOf", "prefixItems")


def read_structured(
    values: Mapping[str, Any],
) -> tuple[StructuredOutputs | None, Mapping[str, str]]:
    """What a request's fields of these names ask for, null values left out.

    Returns:
        The shape, None where it may be any, and what the request calls the fields that errors
        about it name.

    Raises:
        InvalidRequestError: A field is malformed, or several ask for something.
    """
    found: list[tuple[str, StructuredOutputs, Mapping[str, str]]] = []
    for name in ("response_format", "structured_outputs", *_OTHERS):
        value = values.get(name)
        if value is None or (name == "grammar" and value == ""):
            continue
        if name == "response_format":
            asked, where = _response_format(value)
        elif name == "structured_outputs":
            asked, where = _structured_outputs(value)
        else:
            pattern = values.get("guided_whitespace_pattern") if name == "guided_json" else None
            asked = {_OTHERS[name]: value, "whitespace_pattern": pattern}
            where = {_OTHERS[name]: name, "whitespace_pattern": "guided_whitespace_pattern"}
        if not asked:
            continue
        renamed = {_KINDS.get(key, key): place for key, place in where.items()}
        renamed["structured"] = name
        found.append((name, _checked(asked, renamed), renamed))
    if not found:
        return None, {}
    if len(found) > 1:
        raise InvalidRequestError(found[1][0], f"doesn't go with {found[0][0]}")
    _, structured, renamed = found[0]
    return structured, renamed


def read_format(
    format: object, where: str, structured: object
) -> tuple[StructuredOutputs | None, Mapping[str, str]]:
    """What an answer must look like.

    Args:
        format: Of ``/v1/responses`` or of Anthropic's API.
        where: Its place in the request.
        structured: vLLM's field of that name.

    Returns:
        As ``read_structured`` does.

    Raises:
        InvalidRequestError: It is malformed.
    """
    if isinstance(format, Mapping) and format.get("type") == "json_schema":
        # The chat API has one level more.
        format = {"type": "json_schema", "json_schema": format}
    values = {"response_format": format, "structured_outputs": structured}
    try:
        wanted, renamed = read_structured(values)
    except InvalidRequestError as error:
        raise renamed_error(error, {error.field: _place(error.field, where)}) from error
    return wanted, {name: _place(place, where) for name, place in renamed.items()}


def _place(field: str, where: str) -> str:
    """A field of the chat API's format, where it is in the request."""
    if not field.startswith("response_format"):
        return field
    return where + field.removeprefix("response_format").removeprefix(".json_schema")


def close_objects(schema: object) -> object:
    """A schema whose objects have no properties but those that they name.

    Those that combine several schemas by ``allOf`` stay as they are.
    """
    if not isinstance(schema, Mapping) or is_deeper(schema, MAX_JSON_DEPTH):
        return schema  # it will be refused
    closed = dict(schema)
    for name in _NAMED_SCHEMAS:
        if isinstance(schema.get(name), Mapping):
            closed[name] = {key: close_objects(each) for key, each in schema[name].items()}
    for name in _LISTED_SCHEMAS:
        if isinstance(schema.get(name), list):
            closed[name] = [close_objects(each) for each in schema[name]]
    if "items" in schema:
        closed["items"] = close_objects(schema["items"])
    is_open = not {"additionalProperties", "patternProperties", "allOf"} & set(schema)
    if "properties" in schema and is_open:
        closed["additionalProperties"] = False
    return closed


def _checked(asked: Mapping[str, Any], renamed: Mapping[str, str]) -> StructuredOutputs:
    fields = {_KINDS.get(name, name): value for name, value in asked.items()}
    try:
        return StructuredOutputs(**fields)
    except InvalidRequestError as error:
        raise renamed_error(error, renamed) from error


def _response_format(value: object) -> tuple[dict[str, Any], dict[str, str]]:
    where = "response_format"
    fields = as_object(value, where)
    kind = fields.get("type")
    if kind == "text":
        return {}, {}
    if kind == "json_object" and fields.get("schema") is None:
        return {"json_object": True}, {"json_object": where}
    if kind == "json_object":  # llama.cpp's form
        return {"json": fields["schema"]}, {"json": f"{where}.schema"}
    if kind != "json_schema":
        raise InvalidRequestError(
            f"{where}.type",
            f"{shown(kind)} is not supported",
            hint="what is: text, json_object, json_schema",
        )
    where = f"{where}.json_schema"
    inner = as_object(fields.get("json_schema"), where)
    schema = inner.get("schema")
    if schema is None:
        raise InvalidRequestError(f"{where}.schema", "is missing")
    if _switch(inner, "strict", where):
        schema = close_objects(schema)
    return {"json": schema}, {"json": f"{where}.schema"}


def _structured_outputs(value: object) -> tuple[dict[str, Any], dict[str, str]]:
    where = "structured_outputs"
    fields = {name: each for name, each in as_object(value, where).items() if each is not None}
    for name in fields:
        if name not in (*_KINDS, *_SWITCHES, "whitespace_pattern"):
            raise InvalidRequestError(f"{where}.{name[:64]}", "is not supported")
    asked = {name: each for name, each in fields.items() if name not in _SWITCHES}
    if _switch(fields, "disable_any_whitespace", where):
        asked.setdefault("whitespace_pattern", "")
    if _switch(fields, "disable_additional_properties", where) and "json" in asked:
        asked["json"] = close_objects(asked["json"])
    # One that asks for nothing is an error of StructuredOutputs'.
    asked.setdefault("json_object", False)
    return asked, {name: f"{where}.{name}" for name in (*_KINDS, "whitespace_pattern")}


def _switch(fields: Mapping[str, Any], name: str, where: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise InvalidRequestError(f"{where}.{name}", f"{shown(value)} is not true or false")
    return bool(value)
