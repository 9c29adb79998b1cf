"""Values of JSON that comes from outside: taken as what they should be, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pagedmlx.errors import InvalidRequestError

_MAX_SHOWN = 80


def as_object(value: object, where: str) -> Mapping[str, Any]:
    """The value as an object.

    Args:
        value: As it came.
        where: What an error calls it.

    Raises:
        InvalidRequestError: It is something else.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequestError(where, f"{shown(value)} is not an object")
    return cast("Mapping[str, Any]", value)


def as_list(value: object, where: str) -> list[Any]:
    """The value as a list, null as an empty one; else as ``as_object``."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequestError(where, f"{shown(value)} is not a list")
    return cast("list[Any]", value)


def text_of(fields: Mapping[str, Any], name: str, where: str) -> str:
    """The string that an object has under a name; else as ``as_object``."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name}", f"{shown(value)} is not a string")
    return value


def shown(value: object) -> str:
    """The value for an error's text: as Python writes it, and not too long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
