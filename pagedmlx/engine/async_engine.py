"""AsyncEngine: the engine for asyncio programs; it talks to the worker's thread through queues."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from pagedmlx.config import EngineConfig
from pagedmlx.core.snapshot import EngineSnapshot
from pagedmlx.core.stats import EngineStats, RequestProgress
from pagedmlx.engine.inputs import EngineLimits, PreparedJob
from pagedmlx.engine.load import load_engine
from pagedmlx.engine.outputs import Job, OutputEvent, RequestOutput
from pagedmlx.engine.worker import EngineWorker, Sink
from pagedmlx.progress import ProgressCallback
from pagedmlx.text.answer_style import AnswerStyle
from pagedmlx.text.tokenizer import Tokenizer


class AsyncEngine:
    """Many requests at once over one model, for asyncio.

    Make one with ``await AsyncEngine.start(...)``, or use it as ``async with``.

    Args:
        worker: A loaded worker; this object owns it from now on.
    """

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        # If it is forgotten, the engine must not stay; the collector must not wait for it either.
        weakref.finalize(self, worker.close, 0.0)

    @classmethod
    async def start(
        cls,
        config: EngineConfig | None = None,
        *,
        on_progress: ProgressCallback | None = None,
        **settings: Any,
    ) -> Self:
        """Load a model and be ready for requests.

        Args:
            config: All settings; or give them one by one.
            on_progress: Told what is being loaded, on another thread.
            settings: Fields of ``EngineConfig``.

        Raises:
            PagedMLXError: The model can't be loaded or a setting is off.
        """
        chosen = config if config is not None else EngineConfig(**settings)
        load = partial(load_engine, chosen.for_streams())
        return await cls.from_worker(EngineWorker(load, on_progress))

    @classmethod
    async def from_worker(cls, worker: EngineWorker) -> Self:
        """Start a worker and wrap it once its engine is loaded."""
        try:
            await asyncio.wrap_future(worker.start())
        except BaseException:
            worker.close(timeout_s=0.0)
            raise
        return cls(worker)

    async def generate(self, job: Job) -> AsyncIterator[RequestOutput]:
        """Run a request and yield its state each time that one of its outputs grows.

        Ending the iteration early, or cancelling the task, aborts the request.

        Raises:
            InvalidRequestError: The request can't be served; raised before the first output.
            QueueFullError: Too many wait already; raised before the first output.
            EngineDeadError: The engine's loop failed, before or during the request.
            RequestFailedError: The request itself failed.
        """
        events: asyncio.Queue[OutputEvent] = asyncio.Queue()
        sink = _thread_safe(asyncio.get_running_loop(), events.put_nowait)
        prepared = await self.prepare(job)
        collector = prepared.collector()
        self._worker.submit(prepared, sink)
        try:
            while not collector.finished:
                event = await events.get()
                collector.add(event)
                if event.error is not None:
                    raise event.error
                yield collector.output(event.index)
        finally:
            if not collector.finished:
                self._worker.abort(prepared.request_id, sink)

    async def prepare(self, job: Job) -> PreparedJob:
        """Check and tokenize a job, on another thread: a long prompt takes a while.

        Raises:
            InvalidRequestError: The job itself can't be served.
            EngineDeadError: The engine's loop failed.
        """
        return await asyncio.to_thread(self._worker.prepare, job)

    async def submit(self, prepared: PreparedJob, receive: Sink) -> Callable[[], None]:
        """Hand a prepared job over; returns once the engine has taken it.

        Args:
            prepared: The job.
            receive: Gets its events, on this event loop; also after it was aborted.

        Returns:
            Call it to abort the request; it does nothing once that has ended.

        Raises:
            InvalidRequestError: The request could never run.
            QueueFullError: Too many wait already.
            EngineDeadError: The engine's loop failed.
        """
        sink = _thread_safe(asyncio.get_running_loop(), receive)
        abort = partial(self._worker.abort, prepared.request_id, sink)
        taken = self._worker.submit(prepared, sink)
        try:
            await asyncio.wrap_future(taken)
        except BaseException:
            abort()
            raise
        return abort

    async def stats(self) -> EngineStats:
        """A snapshot of all counts, between two steps."""
        return await asyncio.wrap_future(self._worker.call(self._worker.engine.stats))

    async def snapshot(self) -> EngineSnapshot:
        """Who holds which block and who waits, between two steps."""
        return await asyncio.wrap_future(self._worker.call(self._worker.engine.snapshot))

    async def check_integrity(self) -> None:
        """Assert every invariant of the engine, between two steps."""
        await asyncio.wrap_future(self._worker.call(self._worker.engine.check_integrity))

    async def progress(self) -> tuple[RequestProgress, ...]:
        """Where each request in flight is, between two steps."""
        return await asyncio.wrap_future(self._worker.call(self._worker.engine.progress))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; safe on any thread."""
        return self._worker.engine.tokenizer

    @property
    def limits(self) -> EngineLimits:
        """What one request may ask for."""
        return self._worker.engine.limits

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about how the engine was set up."""
        return self._worker.engine.notes

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """Fields of ``SamplingParams`` that the model's maker recommends."""
        return self._worker.engine.sampling_defaults

    @property
    def answer_style(self) -> AnswerStyle:
        """How the model marks reasoning and calls of tools."""
        return self._worker.engine.answer_style

    @property
    def is_healthy(self) -> bool:
        """Whether the step loop is alive."""
        return self._worker.failure is None

    async def close(self) -> None:
        """Abort what runs and stop the engine's thread."""
        await asyncio.to_thread(self._worker.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _thread_safe(loop: asyncio.AbstractEventLoop, receive: Sink) -> Sink:
    def sink(event: OutputEvent) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(receive, event)

    return sink
