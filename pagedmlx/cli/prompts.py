"""Reads a file of prompts, line by line: plain text, or JSON objects with settings of their own.

A line that can't be used becomes a BadLine; the lines after it are still read.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import InvalidRequestError

_SETTINGS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_CONTENT = ("prompt", "messages", "prompt_token_ids")
_OTHERS = {"system": str, "cache_salt": str, "priority": int, "chat_template_kwargs": dict}
_KEYS = frozenset({"id", *_CONTENT, *_OTHERS, *_SETTINGS})


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to run; exactly one of prompt, messages and prompt_token_ids is not None.

    Attributes:
        line: Its line in the file, from 1.
        id: The id it was given, else the line's number.
        prompt: Text of the user.
        messages: A whole conversation.
        prompt_token_ids: Tokens, taken as they are.
        system: System message that goes before ``prompt``; None is the command's.
        params: Sampling settings.
        priority: Larger is served first.
        cache_salt: Blocks are shared only with prompts of the same salt.
        chat_template_kwargs: Variables for the chat template, over the command's.
    """

    line: int
    id: str
    params: SamplingParams
    prompt: str | None = None
    messages: list[Any] | None = None
    prompt_token_ids: list[int] | None = None
    system: str | None = None
    priority: int = 0
    cache_salt: str = ""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that can't be run, with the reason."""

    line: int
    id: str
    error: InvalidRequestError


def read_prompts(
    lines: Iterable[bytes], *, name: str, params: SamplingParams, done: Container[str] = ()
) -> Iterator[Prompt | BadLine]:
    """Read prompts lazily; empty lines are passed over.

    Args:
        lines: The file's lines as bytes.
        name: The file's name; ``.jsonl`` is JSON and ``.txt`` is text, else the first line tells.
        params: Settings that a line's own settings are laid over.
        done: Ids to leave out.
    """
    numbered = ((number, _strip(line, number)) for number, line in enumerate(lines, 1))
    filled = ((number, line) for number, line in numbered if line.strip())
    first = next(filled, None)
    if first is None:
        return
    as_json = _is_json(name, first[1])
    seen: set[str] = set()
    for number, line in chain([first], filled):
        item_id = str(number)
        try:
            text = _decode(line)
            fields = _parse_object(text) if as_json else {"prompt": text}
            item_id = _id(fields, item_id)
            if item_id in seen:
                raise InvalidRequestError("id", f"{item_id!r} came before in this file")
            seen.add(item_id)
            if item_id not in done:
                yield _prompt(number, item_id, fields, params)
        except InvalidRequestError as error:
            located = InvalidRequestError(f"line {number}: {error.field}", _message(error))
            yield BadLine(number, item_id, located)


def _strip(line: bytes, number: int) -> bytes:
    line = line.rstrip(b"\r\n")
    return line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _is_json(name: str, first: bytes) -> bool:
    suffix = os.path.splitext(name)[1].lower()
    if suffix in (".jsonl", ".ndjson", ".txt"):
        return suffix != ".txt"
    return first.lstrip().startswith(b"{")


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError("text", f"is not UTF-8 at byte {error.start + 1}") from error


def _parse_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequestError("JSON", f"{error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("JSON", f"can't be read: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("JSON", "is not an object in braces")
    return {key: item for key, item in value.items() if item is not None}


def _id(fields: dict[str, Any], default: str) -> str:
    value = fields.get("id", default)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise InvalidRequestError("id", f"{value!r} is not a name or a whole number")
    return str(value)


def _prompt(number: int, item_id: str, fields: dict[str, Any], base: SamplingParams) -> Prompt:
    unknown = sorted(fields.keys() - _KEYS)
    if unknown:
        raise InvalidRequestError(unknown[0], "is not a known field")
    content = [key for key in _CONTENT if key in fields]
    if len(content) != 1:
        found = " and ".join(content) or "none"
        raise InvalidRequestError("prompt", f"needs one of {', '.join(_CONTENT)}; it has {found}")
    _check_content(content[0], fields[content[0]])
    for key, kind in _OTHERS.items():
        value = fields.get(key, kind())
        if isinstance(value, bool) or not isinstance(value, kind):
            raise InvalidRequestError(key, f"{value!r} is not of type {kind.__name__}")
    if "system" in fields and content[0] != "prompt":
        raise InvalidRequestError("system", f"goes with prompt, not with {content[0]}")
    settings = {key: value for key, value in fields.items() if key in _SETTINGS}
    return Prompt(
        line=number,
        id=item_id,
        params=dataclasses.replace(base, **settings) if settings else base,
        priority=fields.get("priority", 0),
        cache_salt=fields.get("cache_salt", ""),
        chat_template_kwargs=fields.get("chat_template_kwargs", {}),
        system=fields.get("system"),
        **{content[0]: fields[content[0]]},
    )


def _check_content(key: str, value: object) -> None:
    if key == "prompt":
        if not isinstance(value, str):
            raise InvalidRequestError(key, f"{value!r} is not a string")
        check_prompt(value)
    elif not isinstance(value, list) or not value:
        raise InvalidRequestError(key, "is not a list with something in it")
    elif key == "messages" and not all(isinstance(item, dict) for item in value):
        raise InvalidRequestError(key, "must hold objects with role and content")
    elif key == "prompt_token_ids" and not all(type(item) is int for item in value):
        raise InvalidRequestError(key, "must hold whole numbers")


def check_prompt(text: str) -> None:
    """Refuse a prompt with nothing in it, or with half characters.

    Raises:
        InvalidRequestError: It is empty, blank, or can't be written as UTF-8.
    """
    if not text.strip():
        raise InvalidRequestError("prompt", "is empty", hint="give some text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            "prompt", f"has a broken character at position {error.start + 1}"
        ) from error


def _message(error: InvalidRequestError) -> str:
    return str(error).removeprefix(f"{error.field}: ")
