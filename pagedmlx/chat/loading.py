"""Loading: the client of the model that is talked to; it is waited for, exchanged and closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable

from pagedmlx.chat.client import ChatClient

_CLOSE_S = 1.5


class Loading:
    """Holds one client at a time.

    Attributes:
        client: The client, once its model is loaded.
        stage: What is being done to load it, and the share that is done if that is known.

    Args:
        make_client: Makes the client for a model's name.
    """

    def __init__(self, make_client: Callable[[str], ChatClient]) -> None:
        self.client: ChatClient | None = None
        self.stage: tuple[str, float | None] | None = None
        self._make_client = make_client
        self._starting: ChatClient | None = None
        self._is_ready = asyncio.Event()

    async def ready(self) -> ChatClient:
        """The client, once its model is loaded."""
        while self.client is None:
            await self._is_ready.wait()
        return self.client

    def give_up(self) -> ChatClient | None:
        """From now on there is no client; the one that there was is the caller's to close."""
        gc.unfreeze()
        before, self.client = self.client, None
        self._is_ready.clear()
        return before

    async def take(self, name: str) -> ChatClient:
        """Load a model; cancelled, it stays one that is starting, for ``close``.

        Raises:
            Exception: What the client says; it is closed then.
        """
        client = self._starting = self._make_client(name)
        self.stage = ("starting", None)
        try:
            await client.start(self._on_progress)
        except Exception:
            await client.close()
            self._starting, self.stage = None, None
            raise
        # To look for garbage in all that was loaded would stop model and screen for 0.1 s.
        gc.freeze()
        self.client, self._starting, self.stage = client, None, None
        self._is_ready.set()
        return client

    async def close(self) -> bool:
        """End what there is, and what is on its way; whether all of it has ended."""
        gc.unfreeze()
        has_ended = True
        for client in (self.client, self._starting):
            if client is not None:
                ended = False
                with contextlib.suppress(TimeoutError):
                    ended = await asyncio.wait_for(client.close(), _CLOSE_S)
                has_ended &= ended
        return has_ended

    def _on_progress(self, what: str, share: float | None) -> None:
        # On any thread; whoever shows it looks at it from time to time.
        self.stage = (what, share)
