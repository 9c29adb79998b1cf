"""The exceptions that pagedmlx raises on purpose: one small tree, each with an HTTP status.

Front ends print ``str(error)`` and ``error.hint`` on one line each and never a traceback.
"""

from __future__ import annotations


class PagedMLXError(Exception):
    """Base of every error that a user can cause or must be told about.

    Args:
        message: One line that names the value and the limit.
        hint: One line that says what to do about it; may be empty.
    """

    http_status = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def first_line(error: BaseException) -> str:
    """What an exception of others says, as one line; its type where it says nothing.

    A first line that only announces the next one, by a colon at its end, is joined with it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def readable_bytes(num_bytes: float) -> str:
    """A number of bytes for people, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


class InvalidRequestError(PagedMLXError):
    """A field of a request or a setting has a value that can't be served.

    Args:
        field: Name of the field as the user wrote it.
        message: What is wrong, with the value and the limit.
        hint: What to do about it.
    """

    http_status = 400

    def __init__(self, field: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{field}: {message}", hint=hint)
        self.field = field


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for even one token within the model's context."""


class PoolTooSmallError(InvalidRequestError):
    """The request could not fit the block pool even if it ran alone."""


class QueueFullError(PagedMLXError):
    """The waiting queue is at its limit; try again later."""

    http_status = 429


class ModelNotFoundError(PagedMLXError):
    """No model of that name: not a folder, not cached, not on the hub."""

    http_status = 404


class ModelStoreError(PagedMLXError):
    """A model can't be fetched, kept or removed: no network, no permission, no space."""

    http_status = 502


class ModelLoadError(PagedMLXError):
    """The model's files are missing, damaged or of a form that can't be read."""


class UnsupportedModelError(ModelLoadError):
    """The files are sound, but this model can't run through the paged engine."""


class KernelError(PagedMLXError):
    """A kernel can't be compiled or launched on this device."""


class EngineClosedError(PagedMLXError):
    """The engine was closed; it takes no more work."""

    http_status = 503


class EngineDeadError(PagedMLXError):
    """The step loop failed; every request in flight has been ended with this error."""

    http_status = 503


class RequestFailedError(PagedMLXError):
    """One request's own work failed; the others go on."""


class NoTokenLeftError(RequestFailedError):
    """A request's own settings forbid every token at some place of its output."""

    http_status = 400
