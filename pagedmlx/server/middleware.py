"""What happens around every request: its id, its log line, the key, and the last net for faults."""

from __future__ import annotations

import hmac
import re
import time
import uuid
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedmlx.server.errors import HttpError, error_response, is_anthropic
from pagedmlx.server.service import Service, logger
from pagedmlx.server.writer import Usage

_REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


class RequestLog:
    """Gives each request its id, logs a line at its end, and turns a fault of ours into a 500.

    Args:
        app: What is inside.
        service: Its settings and its metrics.
        paths: The routes' paths, which may be counted by name.
    """

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self._app = app
        self._service = service
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        note: dict[str, Any] = {}
        scope.setdefault("state", {})["note"] = note
        request_id = _request_id(Headers(scope=scope))
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if is_anthropic(scope["path"]):
                    headers["request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("%s %s failed", scope["method"], _path(scope))
            if status:
                raise
            error = HttpError(500, "a fault of the server; its log has more", code="server_fault")
            await error_response(error, scope["path"])(scope, receive, send_with_id)
        finally:
            path = scope["path"] if scope["path"] in self._paths else ""
            self._service.metrics.count_response(path, status)
            if self._service.settings.log_requests:
                logger.info("%s", _line(scope, status, time.monotonic() - began, request_id, note))


class Auth:
    """Lets in only those who have a key, if there are keys.

    Args:
        app: What is inside.
        keys: Any of them will do.
        open_paths: What needs none.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 401."""
        is_open = scope["type"] != "http" or not self._keys or scope["path"] in self._open_paths
        key = None if is_open else self._known_key(Headers(scope=scope))
        if is_open or key is not None:
            if scope["type"] == "http":
                scope["state"]["owner"] = key or ""
            await self._app(scope, receive, send)
            return
        error = HttpError(
            401,
            "the API key is missing or wrong",
            code="invalid_api_key",
            hint="send Authorization: Bearer KEY or X-API-Key: KEY",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error, scope["path"])(scope, receive, send)

    def _known_key(self, headers: Headers) -> str | None:
        """A name for the key that came, which isn't the key itself."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        found = None
        for given in (token if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")):
            data = given.strip().encode("latin-1")
            # Always all of them, so that the time tells nothing.
            matches = [hmac.compare_digest(data, each) for each in self._keys]
            if any(matches):
                found = f"key {matches.index(True)}"
        return found


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def _path(scope: Scope) -> str:
    """As it came, which is printable ASCII; cut to a length that a line can bear."""
    return scope.get("raw_path", b"").decode("latin-1")[:200]


def _line(scope: Scope, status: int, seconds: float, request_id: str, note: dict[str, Any]) -> str:
    words = [scope["method"], _path(scope), str(status), f"{seconds:.3f}s", request_id]
    if "id" in note:
        words.append(note["id"])
    usage = note.get("usage")
    if isinstance(usage, Usage):
        words += [
            f"prompt={usage.num_prompt_tokens}",
            f"cached={usage.num_cached_tokens}",
            f"output={usage.num_output_tokens}",
        ]
    if "error" in note:
        words.append(f"error={note['error']!r}")
    return " ".join(words)
