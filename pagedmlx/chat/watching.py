"""Watching: the one clock by which text, block map and numbers are drawn, and its cost."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pagedmlx.chat.widgets.panel import MemoryPanel
from pagedmlx.errors import PagedMLXError

if TYPE_CHECKING:
    from pagedmlx.chat.app import ChatApp

_LOOK_S, _IDLE_S = 0.1, 0.4
_NUMBERS_S = 0.9
"""Nobody reads numbers faster."""

_GATHER_S = 0.01
"""Widgets tell the screen a moment later that they have changed; it should wait for the last."""

_MAX_FRAME_S = 0.75
_FRAME_SHARE = 0.03
"""Part of a core that the screen may take from the model; a slow machine draws less often."""


class Watching:
    """Shows what goes on.

    Args:
        app: The application.
    """

    def __init__(self, app: ChatApp) -> None:
        self._app = app
        self._numbers_s = float("-inf")

    async def run(self) -> None:
        """Go on until it is cancelled."""
        looking = asyncio.create_task(self.look())
        looked_s = drawn_s = time.monotonic()
        used_s = time.thread_time()
        try:
            while True:
                began_s = time.monotonic()
                is_busy = any(pane.is_busy for pane in self._app.panes)
                if looking.done() and (is_busy or began_s - looked_s >= _IDLE_S):
                    looking, looked_s = asyncio.create_task(self.look()), began_s
                # A screen costs the same for text, for the map and for both: they go together,
                # but text waits for no endpoint.
                await asyncio.wait({looking}, timeout=_MAX_FRAME_S)
                is_changed = looking.done() and looking.result()
                # All that this thread did since it drew last: text, layout, map and painting.
                wanted_s = min(_MAX_FRAME_S, (time.thread_time() - used_s) / _FRAME_SHARE)
                if is_changed or time.monotonic() - drawn_s >= wanted_s:
                    drawn_s, used_s = time.monotonic(), time.thread_time()
                    with self._app.batch_update():
                        self._draw(drawn_s)
                        await asyncio.sleep(_GATHER_S)
                    self._app.screen.check_idle()
                await asyncio.sleep(max(0.0, began_s + _LOOK_S - time.monotonic()))
        finally:
            looking.cancel()

    async def look(self) -> bool:
        """Show whose blocks are whose now, and tell whether that has changed.

        The engine isn't asked while the memory is hidden.
        """
        app = self._app
        panel = app.query_one(MemoryPanel)
        if app.client is None or not panel.display:
            return False
        try:
            snapshot = await app.client.snapshot()
        except PagedMLXError as error:
            panel.show_silence(str(error))
            return False
        return app.client is not None and panel.show(snapshot, time.monotonic())

    def _draw(self, now_s: float) -> None:
        pane, client = self._app.pane, self._app.client
        self._app.show_loading()
        pane.draw()
        if client is not None and now_s - self._numbers_s >= _NUMBERS_S:
            self._numbers_s = now_s
            pane.show_status()
            panel = self._app.query_one(MemoryPanel)
            panel.show_numbers(client.max_len, pane.progress.ttft_s, now_s)
