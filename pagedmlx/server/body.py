"""Reads a request's body as a JSON object: in bounded time and space, and only what is JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn, cast

from starlette.requests import Request

from pagedmlx.server.errors import ClientGoneError, HttpError
from pagedmlx.server.settings import ServerSettings

MAX_DEPTH = 64
"""Most levels of lists and objects within each other."""

_LONG_BYTES = 1 << 16


async def read_json(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """The JSON object that a request brings.

    Raises:
        HttpError: It is too long, comes too slowly, or is no JSON object.
        ClientGoneError: The client left before all of it had come.
    """
    _check_headers(request, settings.max_body_bytes)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            data = await _read(request, settings.max_body_bytes)
    except TimeoutError as error:
        raise HttpError(
            408,
            f"the body didn't come within {settings.body_timeout_s:g} seconds",
            code="body_timeout",
        ) from error
    # A long one takes a while; the event loop goes on meanwhile.
    is_long = len(data) > _LONG_BYTES
    return await asyncio.to_thread(parse_object, data) if is_long else parse_object(data)


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse the JSON object that a body is.

    Raises:
        HttpError: It is not JSON, not an object, nested too deeply or has lone surrogates.
    """
    if not data.strip():
        _refuse("the body is empty", hint="a JSON object is expected")
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        _refuse("the body is nested too deeply")
    except ValueError as error:  # JSON, UTF-8 and numbers with too many digits
        _refuse(f"the body is not JSON: {error}")
    if not isinstance(value, dict):
        _refuse(f"the body is a JSON {_kind(value)}, and an object is expected")
    fields = cast("dict[str, Any]", value)
    for field, each in fields.items():
        _check_text("the body", field)
        _check(field, each)
    return fields


def _check_headers(request: Request, max_bytes: int) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Also keeps web pages out: browsers ask before they send this type to another origin.
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(
            415,
            f"the content type is {kind or 'missing'!r}",
            code="unsupported_media_type",
            hint="send Content-Type: application/json",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpError(
            415,
            f"the content encoding {encoding!r} is not understood",
            code="unsupported_media_type",
            hint="send the body as it is",
        )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        _refuse_length(max_bytes)


async def _read(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            _refuse_length(max_bytes)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _check(field: str, value: Any) -> None:
    """Look at every level; what is deeper than all of them could exhaust some stack later."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            if isinstance(each, str):
                _check_text(field, each)
            elif isinstance(each, dict):
                for key in cast("dict[str, Any]", each):
                    _check_text(field, key)
                below += cast("dict[str, Any]", each).values()
            elif isinstance(each, list):
                below += cast("list[Any]", each)
        if not below:
            return
        level = below
    _refuse(f"{field}: nested more than {MAX_DEPTH} levels deep")


def _check_text(field: str, text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise HttpError(
            400,
            f"{field}: character {error.start} of a text is a lone surrogate, which no text has",
            code="invalid_value",
            param=field,
        ) from error


def _refuse(message: str, *, hint: str = "") -> NoReturn:
    raise HttpError(400, message, code="invalid_json", hint=hint)


def _refuse_constant(name: str) -> NoReturn:
    _refuse(f"the body is not JSON: it has no {name}")


def _refuse_length(max_bytes: int) -> NoReturn:
    raise HttpError(413, f"the body is longer than {max_bytes} bytes", code="body_too_large")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", str: "string", list: "array"}
    return kinds.get(type(value), "number")
