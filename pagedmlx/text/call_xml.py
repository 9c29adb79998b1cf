"""Calls of tools as Qwen3-Coder writes them, a tag for each argument, to JSON as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagedmlx.text.marks import next_mark

XML_CALL = re.compile(r"\s*<function=(?P<name>[^\s<>]+)>")
"""A call up to its arguments."""

_PARAMETER = "<parameter="
_NAME = re.compile(r"([^<>\n]*)>(?=.)", re.DOTALL)
_NO_NAME = re.compile(r"[^<>\n]*[<\n]")
_END = "</function>"
_END_OF_VALUE = "</parameter>"
_LITERALS = {"True": "true", "False": "false", "None": "null"}


class XmlArguments:
    """Turns the tags of one call into the text of a JSON object.

    A value that is text is passed on while it is written, any other when it is whole.

    Args:
        schema: What the tool takes.
        ends: Marks that end the call where its own end is missing.

    Attributes:
        stray: What stands between the tags and belongs nowhere.
    """

    def __init__(self, schema: Mapping[str, Any], ends: Sequence[str]) -> None:
        self._properties: Mapping[str, Any] = schema.get("properties", {})
        self._marks = (_PARAMETER, _END, *ends)
        self._read = self._read_tags
        self._end_of_value = _END_OF_VALUE
        self._types: frozenset[str] = frozenset()
        self._value = ""
        self._skips_break = False
        self._num_values = 0
        self._json: list[str] = ["{"]
        self._held = ""
        self.stray = ""

    def add(self, text: str, *, is_last: bool) -> tuple[str, str | None]:
        """Go on with the next text.

        Returns:
            More of the JSON text, and what comes behind the call if that has ended.
        """
        self._held += text
        rest = None
        while self._held and rest is None:
            num_held = len(self._held)
            rest = self._read(is_last=is_last)
            if rest is None and len(self._held) == num_held:
                break
        written, self._json = "".join(self._json), []
        return written, rest

    def _read_tags(self, *, is_last: bool) -> str | None:
        place, mark = next_mark(self._held, self._marks, is_last=is_last)
        behind = self._held[place + len(mark) :]
        if mark == _PARAMETER:
            name = _NAME.match(behind)
            if name is None and not _NO_NAME.match(behind):
                return None  # it may still come
            self.stray += self._held[:place].strip()
            if name is None:
                self.stray += mark
                self._held = behind
            else:
                self._held = behind[name.end() :]
                self._begin(name[1].strip(), on_lines=self._held[0] == "\n")
            return None
        self.stray += self._held[:place].strip()
        self._held = self._held[place:]
        if not mark:
            return None
        self._json.append("}")
        return behind if mark == _END else self._held

    def _begin(self, name: str, *, on_lines: bool) -> None:
        self._types = schema_types(self._properties.get(name))
        self._end_of_value = f"\n{_END_OF_VALUE}" if on_lines else _END_OF_VALUE
        comma = ", " if self._num_values else ""
        self._num_values += 1
        self._json.append(f"{comma}{json.dumps(name, ensure_ascii=False)}: ")
        if self._is_text:
            self._json.append('"')
        self._value = ""
        self._skips_break = on_lines
        self._read = self._read_value

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}

    def _read_value(self, *, is_last: bool) -> str | None:
        place, mark = next_mark(self._held, (self._end_of_value,), is_last=is_last)
        value, self._held = self._held[:place], self._held[place + len(mark) :]
        if value and self._skips_break:
            value, self._skips_break = value[1:], False
        self._value += value
        if self._is_text:
            self._json.append(json.dumps(value, ensure_ascii=False)[1:-1])
        if mark:
            self._json.append('"' if self._is_text else _converted(self._value, self._types))
            self._read = self._read_tags
        return None


def schema_types(schema: object) -> frozenset[str]:
    """The types that a schema names; text if it names none."""
    return frozenset(_types(schema)) or frozenset({"string"})


def _types(schema: object) -> Iterable[str]:
    if not isinstance(schema, Mapping):
        return
    named = schema.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (each for each in named if isinstance(each, str))
    else:
        if "$ref" in schema:
            yield "object"
        for key in ("anyOf", "oneOf", "allOf"):
            choices = schema.get(key)
            for each in choices if isinstance(choices, list) else ():
                yield from _types(each)
        for each in (schema.get("enum") or ()) if isinstance(schema.get("enum"), list) else ():
            yield "string" if isinstance(each, str) else "number"


def _converted(value: str, types: frozenset[str]) -> str:
    """A value as JSON; what is none of its types is text."""
    value = value.strip() if "string" not in types else value
    text = _LITERALS.get(value.strip(), value)
    try:
        found = json.loads(text)
        if not isinstance(found, str) or "string" not in types:
            return json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    return json.dumps(value, ensure_ascii=False)
