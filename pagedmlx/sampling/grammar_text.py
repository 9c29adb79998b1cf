"""Structured outputs as llguidance reads them, and what of them is refused before it sees them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from pagedmlx.core.structured import MAX_JSON_DEPTH, StructuredOutputs, is_deeper
from pagedmlx.errors import InvalidRequestError, first_line

MAX_MULTIPLE = 20_000
"""Largest common multiple of the digits of a schema's ``multipleOf``: as many states are built."""

MAX_PROPERTIES = 1000
"""Most properties of one object: the work grows with their square."""

# One line, with at most one space after a separator: blanks can't go on for ever.
_ONE_LINE: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
# A string, a regular expression, a comment, or what begins a schema or combines expressions.
_LARK = re.compile(
    r"""
    (?P<string> "(?:\\.|[^"\\\n])*" )
    | (?P<regex> /(?!/)(?:\\.|[^/\\\n])+/ )
    | (?P<comment> (?://|\#)[^\n]* )
    | (?P<json> %json\s*(?=\{) )
    | (?P<operator> [&~] )
    """,
    re.VERBOSE,
)


def grammar_text(structured: StructuredOutputs) -> str:
    """The text that llguidance compiles.

    Raises:
        InvalidRequestError: Something in it is known to take too long.
    """
    from llguidance import LLMatcher

    match structured.kind:
        case "json_schema":
            assert structured.json_schema is not None
            schema = json.loads(structured.json_schema)
            _check_schema(schema, "json_schema")
            return _of_schema(schema, structured.whitespace_pattern)
        case "json_object":
            return _of_schema({"type": "object"}, structured.whitespace_pattern)
        case "choice":
            assert structured.choice is not None
            words = " | ".join(json.dumps(each, ensure_ascii=False) for each in structured.choice)
            # One terminal for all: as rules, two thousand of them would be too much work.
            return _of_lark(f"start: CHOICE\nCHOICE: {words}")
        case "grammar":
            assert structured.grammar is not None
            return _of_lark(_with_one_line_json(_as_lark(structured.grammar)))
        case _:
            assert structured.regex is not None
            return LLMatcher.grammar_from_regex(structured.regex)


def size_of(structured: StructuredOutputs) -> int:
    """Characters that it was made of."""
    texts = (structured.json_schema, structured.regex, structured.grammar, structured.after)
    return sum(len(text or "") for text in (*texts, *(structured.choice or ())))


def _of_schema(schema: object, whitespace: str | None) -> str:
    settings = dict(_ONE_LINE)
    if whitespace:
        settings = {"whitespace_flexible": True, "whitespace_pattern": whitespace}
    elif whitespace == "":
        settings = {"whitespace_flexible": False}
    return _to_json({"grammars": [{"json_schema": _with_settings(schema, settings)}]})


def _with_settings(schema: object, settings: Mapping[str, Any]) -> object:
    """A schema that says how its JSON is written, unless it does already."""
    if not isinstance(schema, dict):
        return schema if not schema else {"x-guidance": settings}
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**settings, **own} if isinstance(own, dict) else settings}


def _of_lark(text: str) -> str:
    return _to_json({"grammars": [{"lark_grammar": text}]})


def _as_lark(text: str) -> str:
    """A grammar in Lark's notation; one in llama.cpp's (GBNF) is translated."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # the translator raises whatever comes
        raise InvalidRequestError("grammar", f"can't be read: {first_line(error)}") from error


def _with_one_line_json(text: str) -> str:
    """A grammar whose ``%json`` schemas say how JSON is written, and whose operators are known.

    Raises:
        InvalidRequestError: It intersects or negates expressions, which may take for ever, or a
            schema is no JSON.
    """
    parts: list[str] = []
    done = 0
    while (found := _LARK.search(text, done)) is not None:
        parts.append(text[done : found.end()])
        done = found.end()
        if found["operator"]:
            raise InvalidRequestError("grammar", f"{found['operator']} is not supported")
        if found["json"]:
            try:
                schema, done = json.JSONDecoder().raw_decode(text, done)
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError("grammar", f"%json: {error}") from error
            _check_schema(schema, "grammar")
            parts.append(_to_json(_with_settings(schema, _ONE_LINE)))
    return "".join((*parts, text[done:]))


def _check_schema(schema: object, field: str) -> None:
    if is_deeper(schema, MAX_JSON_DEPTH):
        raise InvalidRequestError(field, f"is nested more than {MAX_JSON_DEPTH} deep")
    most = max(map(len, _values(schema, "properties", dict)), default=0)
    if most > MAX_PROPERTIES:
        raise InvalidRequestError(
            field, f"an object has {most} properties, at most {MAX_PROPERTIES} are possible"
        )
    common = 1
    for value in _values(schema, "multipleOf", (int, float)):
        digits = Decimal(str(value)).normalize().as_tuple().digits
        common = math.lcm(common, int("".join(map(str, digits))) or 1)
        if common > MAX_MULTIPLE:
            raise InvalidRequestError(
                field,
                f"multipleOf: the digits of all have the common multiple {common}, at most "
                f"{MAX_MULTIPLE} is possible",
            )


def _values(schema: object, name: str, kind: type | tuple[type, ...]) -> Iterable[Any]:
    """All values of some type that stand under a name, however deep."""
    if isinstance(schema, dict):
        found = schema.get(name)
        if isinstance(found, kind):
            yield found
        for value in schema.values():
            yield from _values(value, name, kind)
    elif isinstance(schema, list):
        for each in schema:
            yield from _values(each, name, kind)


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
