"""TimedProtocol: uvicorn's HTTP/1.1 with a limit on how long a client may take for a head."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagedmlx.server.errors import HttpError, error_body, to_json

_MAX_AHEAD = 1 << 16
"""Bytes that are kept of the requests behind the one that is being answered."""


class TimedProtocol(H11Protocol):
    """One connection.

    A head that doesn't come is answered with 408, a body that goes on after its answer is cut off,
    and what is no HTTP gets a JSON error like everything else.

    Args:
        header_timeout_s: How long either may take.
        settings: What uvicorn gives.
    """

    def __init__(self, *, header_timeout_s: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._header_timeout_s = header_timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """It has sent something."""
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < _MAX_AHEAD:
            # Whoever stops reading doesn't notice that the client leaves.
            self.flow.resume_reading()
        self._watch()

    def on_response_complete(self) -> None:
        """It has been answered."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(HttpError(400, msg, code="invalid_http"))

    def _watch(self) -> None:
        is_busy = self.cycle is not None and not self.cycle.response_complete
        comes = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        if is_busy or not comes:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._header_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        message = f"no request came within {self._header_timeout_s:g} seconds"
        self._refuse(HttpError(408, message, code="header_timeout"))

    def _refuse(self, error: HttpError) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # Its head was fine and it is being answered, to nobody from now on.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = to_json(error_body(error))
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            for event in (
                h11.Response(status_code=error.http_status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
