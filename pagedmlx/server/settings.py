"""ServerSettings: every setting of the endpoint, once, with its default and its check."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field

from pagedmlx.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one endpoint.

    Attributes:
        host: Address or name to listen on.
        port: 0 takes any free one.
        api_keys: Any of them opens the server; none means that it is open to everyone.
        served_model_names: What clients may call the model; the first is the one that answers
            carry. Empty derives them from the model's own name.
        strict: Refuse fields of requests that are not known, instead of naming them in a header.
        cors_origins: Web pages of these origins may use the server; ``*`` is all.
        max_body_bytes: Longest body of a request.
        response_store_bytes: Most bytes of answers of ``/v1/responses`` that are kept for clients
            to go on from; 0 keeps none.
        header_timeout_s: How long a client may take for a request's head.
        body_timeout_s: How long it may take for the body.
        send_timeout_s: How long it may take no data before it counts as gone.
        request_timeout_s: How long a request may take in all; 0 is no limit.
        keep_alive_s: After this long without data a stream gets a comment.
        drain_timeout_s: How long requests may go on after SIGTERM.
        log_requests: Log a line for each request, without contents.
        log_contents: Log what is asked and answered, too.

    Raises:
        InvalidRequestError: A value is outside its limits; names the field and the limit.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_names: tuple[str, ...] = ()
    strict: bool = False
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    response_store_bytes: int = 64 * 2**20
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    request_timeout_s: float = 3600.0
    keep_alive_s: float = 5.0
    drain_timeout_s: float = 30.0
    log_requests: bool = True
    log_contents: bool = False

    def __post_init__(self) -> None:
        if not self.host:
            raise InvalidRequestError("host", "is empty", hint="127.0.0.1 is this machine alone")
        if not 0 <= self.port <= 65535:
            raise InvalidRequestError("port", f"{self.port} must be between 0 and 65535")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidRequestError(
                    "api_keys", "a key must be printable ASCII characters without spaces"
                )
        if not all(self.served_model_names):
            raise InvalidRequestError("served_model_names", "one is empty")
        if self.max_body_bytes < 1:
            raise InvalidRequestError("max_body_bytes", f"{self.max_body_bytes} must be at least 1")
        if self.response_store_bytes < 0:
            raise InvalidRequestError(
                "response_store_bytes", f"{self.response_store_bytes} must be at least 0"
            )
        for name, low in (
            ("header_timeout_s", 0.001),
            ("body_timeout_s", 0.001),
            ("send_timeout_s", 0.001),
            ("keep_alive_s", 0.001),
            ("request_timeout_s", 0.0),
            ("drain_timeout_s", 0.0),
        ):
            value = getattr(self, name)
            if not low <= value < math.inf:
                raise InvalidRequestError(name, f"{value:g} must be a number from {low:g}")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def model_names(model: str, settings: ServerSettings) -> tuple[str, ...]:
    """What clients may call a model, the name that answers carry first.

    Args:
        model: ``smollm2``, a path or a hub id, as ``EngineConfig.model``.
        settings: May give names instead.
    """
    if settings.served_model_names:
        return settings.served_model_names
    path = model.replace("\\", "/").rstrip("/")
    short = path.rpartition("/")[2].removesuffix(".gguf") or model
    # Where a model lies on this machine is nobody's business; owner/model is its name.
    is_hub_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    first = path if is_hub_id and not path.endswith(".gguf") else short
    return tuple(dict.fromkeys((first, short, model)))
