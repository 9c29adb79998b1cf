"""Server-sent events: an answer as it grows, and signs of life while nothing comes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedmlx.engine.outputs import OutputEvent
from pagedmlx.errors import PagedMLXError
from pagedmlx.server.errors import ClientGoneError
from pagedmlx.server.format import Format
from pagedmlx.server.generation import Generation
from pagedmlx.server.service import logger
from pagedmlx.server.settings import ServerSettings
from pagedmlx.server.writer import Pieces, Usage


class EventStream(Response):
    """Sends a generation's events; the headers go out at once.

    Args:
        generation: Has started; it is closed here.
        pieces: Makes pieces of its events.
        format: Shapes its events, an error after the headers too.
        usage: Counts its tokens.
        settings: The endpoint's.
        headers: Further headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        pieces: Pieces,
        format: Format,
        usage: Usage,
        *,
        settings: ServerSettings,
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        self._generation = generation
        self._format = format
        self._usage = usage
        self._settings = settings
        self._pieces = pieces
        self._last_s = 0.0
        self._texts: dict[int, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, self._format.begin())
            try:
                while not self._generation.is_finished:
                    await self._send(send, await self._next())
                await self._send(send, self._format.end(), more=False)
            except PagedMLXError as error:
                scope["state"]["note"].update(error=str(error))
                await self._send(send, self._format.error(error), more=False)
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
            return self._format.keep_alive()
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
            yield self._format.piece(piece)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        now = time.monotonic()
        if not data and more:
            # Tokens came that show no text yet.
            if now - self._last_s < self._settings.keep_alive_s:
                return
            data = self._format.keep_alive()
        self._last_s = now
        try:
            async with asyncio.timeout(self._settings.send_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError as error:
            raise ClientGoneError from error
