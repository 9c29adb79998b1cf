"""Generation: the engine's work for one HTTP request, watched until it ends or nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from starlette.types import Receive

from pagedmlx.engine.async_engine import AsyncEngine
from pagedmlx.engine.inputs import PreparedJob
from pagedmlx.engine.outputs import Job, OutputEvent
from pagedmlx.server.errors import ClientGoneError, HttpError
from pagedmlx.server.metrics import Metrics, RequestWatch


class Generation:
    """One or several jobs of the same HTTP request.

    Whatever happens, ``close`` must be called; it aborts what still runs.

    Args:
        engine: Runs them.
        metrics: Told of each.
        receive: Of the HTTP request, whose body has been read: it tells when the client leaves.
        timeout_s: How long all of it may take; 0 is no limit.
        on_close: Called once, by ``close``.

    Attributes:
        prepared: The jobs that were submitted.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        metrics: Metrics,
        receive: Receive,
        *,
        timeout_s: float,
        on_close: Callable[[Generation], None],
    ) -> None:
        self.prepared: tuple[PreparedJob, ...] = ()
        self._engine = engine
        self._metrics = metrics
        self._on_close = on_close
        self._items: asyncio.Queue[tuple[int, OutputEvent] | Exception] = asyncio.Queue()
        self._aborts: list[Callable[[], None]] = []
        self._watches: list[RequestWatch] = []
        self._num_open = 0
        self._watcher = asyncio.create_task(self._watch(receive))
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s:
            late = HttpError(
                504,
                f"the request took more than {timeout_s:g} seconds",
                code="request_timeout",
                # Trying again would take as long.
                headers={"x-should-retry": "false"},
            )
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self.fail, late)

    async def start(self, jobs: Sequence[Job]) -> None:
        """Check all jobs, then hand them to the engine; returns when it has taken them.

        Raises:
            PagedMLXError: One of them is refused; then none runs.
        """
        await self.submit([await self._engine.prepare(job) for job in jobs])

    async def submit(self, prepared: Sequence[PreparedJob]) -> None:
        """Hand jobs to the engine, together; returns when it has taken them.

        Raises:
            PagedMLXError: One of them is refused.
        """
        first = len(self.prepared)
        self.prepared += tuple(prepared)
        self._num_open += sum(each.params.n for each in prepared)
        for each in prepared:
            watch = self._metrics.watch(len(each.prompt_token_ids), each.params.n)
            self._watches.append(watch)
        # One by one, each would wait for a step of the others.
        taken = await asyncio.gather(
            *(self._submit(index, each) for index, each in enumerate(prepared, first)),
            return_exceptions=True,
        )
        for problem in filter(None, taken):
            raise problem

    async def _submit(self, index: int, prepared: PreparedJob) -> None:
        self._aborts.append(await self._engine.submit(prepared, partial(self._take, index)))

    @property
    def is_finished(self) -> bool:
        """Whether every output has ended, and all events have been taken."""
        return self._num_open == 0 and self._items.empty()

    @property
    def has_more(self) -> bool:
        """Whether ``next`` would return at once."""
        return not self._items.empty()

    async def next(self, timeout_s: float | None = None) -> tuple[int, OutputEvent] | None:
        """The number of a job and its next event; None if none came in time.

        Raises:
            ClientGoneError: The client has left.
            PagedMLXError: An output failed, time is up, or the server stops.
        """
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._items.get()
        except TimeoutError:
            return None
        if isinstance(item, Exception):
            raise item
        if item[1].error is not None:
            raise item[1].error
        return item

    def fail(self, error: Exception) -> None:
        """Let ``next`` raise an error, before anything that waits there already."""
        while not self._items.empty():
            self._items.get_nowait()
        self._items.put_nowait(error)

    def close(self) -> None:
        """Abort what still runs and stop watching."""
        self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for abort in self._aborts:
            abort()
        self._on_close(self)

    def _take(self, index: int, event: OutputEvent) -> None:
        self._watches[index].note(event)
        self._num_open -= event.finish_reason is not None
        self._items.put_nowait((index, event))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientGoneError())
