"""How errors look to a client: OpenAI's shape, or Anthropic's on the paths of its API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from pagedmlx.errors import (
    ContextLengthError,
    InvalidRequestError,
    NoTokenLeftError,
    PagedMLXError,
    PoolTooSmallError,
    QueueFullError,
)

_MAX_MESSAGE = 600
_MAX_PARAM = 80
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
_CODES = (
    (ContextLengthError, "context_length_exceeded"),
    (PoolTooSmallError, "pool_too_small"),
    (NoTokenLeftError, "no_token_left"),
    (QueueFullError, "queue_full"),
    (InvalidRequestError, "invalid_value"),
)


class HttpError(PagedMLXError):
    """A request that is refused, or can't be served now, for a reason of HTTP.

    Args:
        status: HTTP's status.
        message: One line.
        code: What programs tell it by.
        param: The field that is at fault, if one is.
        hint: One line that says what to do about it.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        hint: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.http_status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class JsonResponse(Response):
    """A JSON answer; unlike Starlette's it can carry whatever text a client has sent."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return to_json(content)


def to_json(content: Any) -> bytes:
    """JSON as UTF-8; lone surrogates become the escapes that JSON has for them."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def error_body(error: PagedMLXError) -> dict[str, Any]:
    """The body of an error answer, and of an error event in a stream."""
    param = error.param if isinstance(error, HttpError) else getattr(error, "field", None)
    code = error.code if isinstance(error, HttpError) else _code(error)
    status = error.http_status
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    message = f"{error} ({error.hint})" if error.hint else str(error)
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + "..."
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": param if param is None else param[:_MAX_PARAM],
            "code": code,
        }
    }


def anthropic_error_body(error: PagedMLXError) -> dict[str, Any]:
    """The same for the clients of Anthropic's API."""
    status = error.http_status
    kind = "api_error" if status >= 500 else "invalid_request_error"
    told = error_body(error)["error"]
    body = {"type": _ANTHROPIC_TYPES.get(status, kind), "message": told["message"]}
    if told["param"] == "thread":
        # By this Anthropic's client knows that it must send the whole conversation each time.
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": body}


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path in _ANTHROPIC_PATHS


def error_response(error: PagedMLXError, path: str) -> JsonResponse:
    """The answer to a request that failed before anything of it was sent.

    Args:
        error: What is wrong.
        path: Of the request; it decides on the shape.
    """
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    if error.http_status == 429:
        headers.setdefault("Retry-After", "1")
    body = anthropic_error_body(error) if is_anthropic(path) else error_body(error)
    return JsonResponse(body, error.http_status, headers)


def _code(error: PagedMLXError) -> str | None:
    return next((code for kind, code in _CODES if isinstance(error, kind)), None)
