"""StructuredOutputs: the shape that an output must have, as a plain value that nothing compiles."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from pagedmlx.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_GRAMMAR_CHARS = 1 << 18
"""Longest schema, regular expression or grammar, and all choices together."""

MAX_CHOICES = 4096
MAX_JSON_DEPTH = 100
"""Deepest nesting of a JSON schema's text."""

_MAX_MARKER_CHARS = 256
_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What an output's text must match: exactly one of the first five is given.

    JSON is written on one line, with at most one space after a colon or comma, unless
    ``whitespace_pattern`` says otherwise: a model can't fill its answer with blanks.

    Attributes:
        json_schema: JSON that the schema allows. Text, or a mapping or boolean that is written
            out; kept as text.
        json_object: Any JSON object.
        regex: The whole output matches it; Rust's syntax, which has no look-around and no back
            references.
        choice: One of these strings.
        grammar: A context-free grammar in Lark's notation as llguidance reads it, with a rule
            ``start``; ``%json {...}`` stands for what a schema allows. Or in llama.cpp's (GBNF),
            with a rule ``root``.
        after: The grammar begins behind this marker, such as ``</think>``; text before it is free.
        whitespace_pattern: Regular expression of what may stand between the parts of JSON; the
            empty one is nothing at all.

    Raises:
        InvalidRequestError: A value is of the wrong type or too large, or not exactly one is given.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    after: str = ""
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if not isinstance(cast("object", self.json_object), bool):
            raise InvalidRequestError("json_object", f"{self.json_object!r} is not true or false")
        for field in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, field) is not None:
                _check_text(field, getattr(self, field), MAX_GRAMMAR_CHARS)
        _check_text("after", self.after, _MAX_MARKER_CHARS)
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequestError(
                "structured", f"exactly one of {', '.join(_KINDS)} is needed, not {found}"
            )
        if self.whitespace_pattern is not None and given[0] not in ("json_schema", "json_object"):
            raise InvalidRequestError("whitespace_pattern", f"goes with JSON, not with {given[0]}")

    @property
    def kind(self) -> str:
        """The name of the one field that is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))


class GrammarMatcher(Protocol):
    """Follows one output, token by token. One thread at a time may use it."""

    def mask(self) -> npt.NDArray[np.uint32]:
        """Which tokens may come next: (ceil(V / 32),), token t is bit t % 32 of word t // 32.

        Raises:
            NoTokenLeftError: None may, or it takes too long to find out.
        """
        ...

    def advance(self, token_id: int) -> bool:
        """Take in the output's next token.

        Returns:
            Whether the output is whole and nothing may follow.

        Raises:
            NoTokenLeftError: The token fits nowhere, or it takes too long to find out.
        """
        ...


class Grammar(Protocol):
    """Compiled structured outputs; safe on any thread."""

    def start(self) -> GrammarMatcher:
        """A matcher for an output of its own."""
        ...


class GrammarBackend(Protocol):
    """Compiles structured outputs for one model's tokens; safe on any thread."""

    def compile(self, structured: StructuredOutputs) -> Grammar:
        """The grammar; soon where it was compiled before.

        Raises:
            InvalidRequestError: It makes no sense, allows nothing, or is too much work.
        """
        ...


def _check_text(field: str, value: object, limit: int) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(field, f"{type(value).__name__} is not text")
    if len(value) > limit:
        raise InvalidRequestError(field, f"{len(value)} characters, at most {limit}")
    try:
        value.encode()
    except UnicodeError as error:
        raise InvalidRequestError(field, "has characters that can't be encoded as UTF-8") from error


def _schema_text(value: object) -> str:
    if isinstance(value, str):
        # Text of such depth must not reach a parser that recurses.
        _check_text("json_schema", value, MAX_GRAMMAR_CHARS)
        try:
            value = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError("json_schema", f"is not JSON: {error}") from error
    if not isinstance(value, dict | bool):
        raise InvalidRequestError(
            "json_schema", f"{type(value).__name__} is not an object, true or false"
        )
    if is_deeper(cast("object", value), MAX_JSON_DEPTH):
        raise InvalidRequestError("json_schema", f"is nested more than {MAX_JSON_DEPTH} deep")
    try:
        # In the order given: that of the properties is the order of the output.
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError("json_schema", f"can't be written as JSON: {error}") from error
    _check_text("json_schema", text, MAX_GRAMMAR_CHARS)
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def is_deeper(value: object, limit: int) -> bool:
    """Whether lists and mappings are nested deeper, looked at level by level."""
    level: list[object] = [value]
    for _ in range(limit + 1):
        below: list[object] = []
        for each in level:
            if isinstance(each, dict):
                below += cast("dict[object, object]", each).values()
            elif isinstance(each, list | tuple):
                below += cast("Iterable[object]", each)
        level = below
        if not level:
            return False
    return True


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        found = type(cast("object", value)).__name__
        raise InvalidRequestError("choice", f"{found} is not a list of strings")
    given = tuple(cast("Iterable[object]", value))
    for each in given:
        _check_text("choice", each, MAX_GRAMMAR_CHARS)
    choices = tuple(dict.fromkeys(cast("tuple[str, ...]", given)))
    if not choices:
        raise InvalidRequestError("choice", "is empty; at least one string is needed")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequestError("choice", f"{len(choices)} strings, at most {MAX_CHOICES}")
    if sum(map(len, choices)) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError("choice", f"more than {MAX_GRAMMAR_CHARS} characters in all")
    return choices
