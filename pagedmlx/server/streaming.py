"""Server-sent events: an answer as it grows, comments while nothing comes, one ``[DONE]``."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedmlx.engine.outputs import OutputEvent
from pagedmlx.errors import PagedMLXError
from pagedmlx.server.errors import ClientGoneError, error_body, to_json
from pagedmlx.server.generation import Generation
from pagedmlx.server.service import logger
from pagedmlx.server.settings import ServerSettings
from pagedmlx.server.writer import Pieces, Usage, Writer

_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"


class EventStream(Response):
    """Sends a generation's events; the headers go out at once.

    An error after that is an event with ``error``, and no ``[DONE]`` follows it.

    Args:
        generation: Has started; it is closed here.
        writer: Shapes it.
        usage: Counts its tokens.
        head: What each event begins with.
        include_usage: End with a chunk of token counts.
        settings: The endpoint's.
        headers: Further headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        writer: Writer,
        usage: Usage,
        head: Mapping[str, Any],
        *,
        include_usage: bool,
        settings: ServerSettings,
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        self._generation = generation
        self._writer = writer
        self._usage = usage
        self._head = head
        self._include_usage = include_usage
        self._settings = settings
        self._pieces = Pieces(generation.prepared)
        self._last_s = 0.0
        self._texts: dict[int, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # A comment brings the headers through whatever waits for a first byte.
            await self._send(send, _KEEP_ALIVE)
            try:
                while not self._generation.is_finished:
                    await self._send(send, await self._next())
                await self._send(send, self._end(), more=False)
            except PagedMLXError as error:
                scope["state"]["note"].update(error=str(error))
                await self._send(send, _event(error_body(error)), more=False)
        except ClientGoneError:
            scope["state"]["note"].update(error="the client left")
        finally:
            self._generation.close()
            if self._settings.log_contents:
                logger.info("answered: %s", json.dumps(self._texts))

    async def _next(self) -> bytes:
        """The next events, as many as are there already."""
        found = await self._generation.next(self._settings.keep_alive_s)
        if found is None:
            return _KEEP_ALIVE
        data = list(self._events(*found))
        while self._generation.has_more:
            more = await self._generation.next()
            if more is not None:
                data += self._events(*more)
        return b"".join(data)

    def _events(self, job: int, event: OutputEvent) -> Iterator[bytes]:
        self._usage.note(job, event)
        for piece in self._pieces.take(job, event):
            if self._settings.log_contents:
                self._texts[piece.index] = self._texts.get(piece.index, "") + piece.text
            for choice in self._writer.chunks(piece):
                yield self._chunk([choice])

    def _end(self) -> bytes:
        if not self._include_usage:
            return _DONE
        return self._chunk([], self._usage.as_json()) + _DONE

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        body = {**self._head, "choices": choices}
        return _event({**body, "usage": usage} if self._include_usage else body)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        now = time.monotonic()
        if not data and more:
            # Tokens came that show no text yet.
            if now - self._last_s < self._settings.keep_alive_s:
                return
            data = _KEEP_ALIVE
        self._last_s = now
        try:
            async with asyncio.timeout(self._settings.send_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError as error:
            raise ClientGoneError from error


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
