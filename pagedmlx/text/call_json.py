"""Calls of tools that are written as JSON: their beginning, their end, and all of them at once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

JSON_CALL = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\<]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""A call up to its arguments, which are an object."""


def parse_json_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Read one object, or a list of them, with ``name`` and ``arguments`` or ``parameters``.

    Arguments may be JSON text within a string, or missing if there are none.

    Raises:
        ValueError: It is anything else.
    """
    found = json.loads(text)
    calls = found if isinstance(found, list) else [found]
    return [_call(call) for call in calls]


def _call(call: object) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("no call has this form")
    keys = [key for key in ("arguments", "parameters") if key in call]
    if not keys and call.keys() - {"name", "id"}:
        raise ValueError("no call has these keys")
    arguments = call[keys[0]] if keys else {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {"name": call["name"], "arguments": arguments, "id": call.get("id")}


class ObjectEnd:
    """Finds the end of a JSON object in text that comes in pieces.

    Where the end mark of a call stands outside a string, the object is broken and ends there;
    inside a string only once that has a line break, which JSON's strings don't have.

    Args:
        mark: The end mark; empty if there is none.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._has_break = False

    def find(self, text: str) -> tuple[int, bool]:
        """Go on with the next piece.

        Returns:
            How many of its characters belong to the object, and whether that ends there. If not,
            the rest may be the beginning of the mark, and is to be given again with what follows.
        """
        for place, char in enumerate(text):
            if self._mark and char == self._mark[0] and (not self._in_string or self._has_break):
                rest = text[place : place + len(self._mark)]
                if rest == self._mark:
                    return place, True
                if self._mark.startswith(rest):
                    return place, False
            if self._in_string:
                self._advance_string(char)
            elif char == '"':
                self._in_string, self._has_break = True, False
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1, True
        return len(text), False

    def _advance_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
        self._has_break |= char == "\n"
