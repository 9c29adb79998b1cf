"""Service: what all endpoints share: settings, the engine once it is loaded, what is under way."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.types import Receive

from pagedmlx.engine.async_engine import AsyncEngine
from pagedmlx.errors import PagedMLXError
from pagedmlx.server.errors import HttpError
from pagedmlx.server.generation import Generation
from pagedmlx.server.metrics import Metrics
from pagedmlx.server.responses_store import ResponseStore
from pagedmlx.server.settings import ServerSettings, model_names

logger = logging.getLogger("pagedmlx.server")
logger.addHandler(logging.NullHandler())


class Service:
    """One endpoint's state; lives on one event loop.

    Args:
        model: The model's name as ``EngineConfig.model`` has it.
        settings: The endpoint's settings.

    Attributes:
        engine: None while it loads.
        is_draining: Whether new work is refused because the server is about to stop.
        responses: Answers that clients may go on from.
        model_names: What clients may call the model; the first is the one that answers carry.
    """

    def __init__(self, model: str, settings: ServerSettings) -> None:
        self.settings = settings
        self.model_names = model_names(model, settings)
        self.metrics = Metrics(self.model_names[0])
        self.responses = ResponseStore(settings.response_store_bytes)
        self.created = int(time.time())
        self.engine: AsyncEngine | None = None
        self.is_draining = False
        self._generations: set[Generation] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def state(self) -> str:
        """``loading``, ``ready``, ``draining`` or ``dead``."""
        if self.engine is None:
            return "loading"
        if not self.engine.is_healthy:
            return "dead"
        return "draining" if self.is_draining else "ready"

    def require_engine(self) -> AsyncEngine:
        """The engine, for new work.

        Raises:
            HttpError: It still loads, has failed, or the server is about to stop.
        """
        state = self.state
        if self.engine is not None and state == "ready":
            return self.engine
        message = {
            "loading": "the model is still loading",
            "dead": "the engine has failed; the server must be started again",
            "draining": "the server is stopping",
        }[state]
        retry = {} if state == "dead" else {"Retry-After": "5"}
        raise HttpError(503, message, code=f"server_{state}", headers=retry)

    def check_model(self, name: str | None) -> str:
        """The name that an answer carries for a model that a client has named.

        Raises:
            HttpError: It is another model.
        """
        if name is not None and name not in self.model_names:
            raise HttpError(
                404,
                f"model: there is no {name[:100]!r} here",
                code="model_not_found",
                param="model",
                hint=f"this server has {self.model_names[0]}",
            )
        return self.model_names[0] if name is None else name

    def begin(self, engine: AsyncEngine, receive: Receive) -> Generation:
        """A generation for a request whose body has been read; the caller must close it.

        It is kept in mind until then, so that it can be ended.
        """
        generation = Generation(
            engine,
            self.metrics,
            receive,
            timeout_s=self.settings.request_timeout_s,
            on_close=self._discard,
        )
        self._generations.add(generation)
        self._is_idle.clear()
        return generation

    def _discard(self, generation: Generation) -> None:
        self._generations.discard(generation)
        if not self._generations:
            self._is_idle.set()

    @property
    def num_generations(self) -> int:
        """Requests whose answers are under way."""
        return len(self._generations)

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, and wait for what is under way; end it when the time is up."""
        self.is_draining = True
        if await self._wait_idle(timeout_s):
            return
        error: PagedMLXError = HttpError(503, "the server is stopping", code="server_stopping")
        for generation in tuple(self._generations):
            generation.fail(error)
        # Their handlers still tell the clients.
        await self._wait_idle(1.0)

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True
