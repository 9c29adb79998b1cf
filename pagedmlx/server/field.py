"""Field: what is known of one field of a request.

A field is used, or accepted because it can't change the text, or refused by name because it would
change the text and isn't supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Use(StrEnum):
    """What is done with a field."""

    USED = "used"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a request.

    Attributes:
        name: As in JSON.
        use: What is done with it.
        help: One sentence.
        param: The field of ``SamplingParams`` that takes its value as it is.
        neutral: Values that a refused field may have, since they ask for nothing.
    """

    name: str
    use: Use
    help: str
    param: str = ""
    neutral: tuple[object, ...] = ()


def sampling(name: str, help: str, param: str = "") -> Field:
    """Taken by ``SamplingParams``."""
    return Field(name, Use.USED, help, param or name)


def used(name: str, help: str) -> Field:
    """Read by its endpoint."""
    return Field(name, Use.USED, help)


def no_effect(name: str, help: str) -> Field:
    """Accepted, since it can't change the text."""
    return Field(name, Use.NO_EFFECT, help)


def refused(name: str, help: str, *neutral: object) -> Field:
    """Refused by name, unless its value is one that asks for nothing."""
    return Field(name, Use.REFUSED, help, neutral=neutral)
