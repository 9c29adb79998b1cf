"""EngineWorker: the one thread that owns an engine, and the only way to it from other threads."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from pagedmlx.engine.outputs import Job, OutputEvent, RequestMetrics
from pagedmlx.errors import EngineClosedError, EngineDeadError, PagedMLXError

if TYPE_CHECKING:
    from pagedmlx.engine.engine import Engine
    from pagedmlx.engine.inputs import PreparedJob

Sink = Callable[[OutputEvent], None]
"""Receives a request's events, on the engine's thread; must be quick and must not raise."""

_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Subscriber:
    sink: Sink
    num_open: int


class EngineWorker:
    """Runs an engine on a thread of its own, from loading to closing.

    All methods are safe on any thread. Every request that was accepted gets a last event for each
    of its outputs, whatever happens to the engine.

    Args:
        build: Makes the engine; called on the worker's thread.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._build = build
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._subscribers: dict[str, _Subscriber] = {}
        self._lock = threading.RLock()
        self._closing = False
        self._failure: EngineDeadError | None = None
        self._engine: Engine | None = None
        self._loaded: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="pagedmlx-engine", daemon=True)

    def start(self) -> Future[None]:
        """Begin to load the engine; the future tells when it is ready, or why it isn't."""
        self._thread.start()
        return self._loaded

    @property
    def engine(self) -> Engine:
        """The engine; from another thread only its constants and ``prepare`` may be used."""
        self._check_open()
        assert self._engine is not None, "the engine is still loading"
        return self._engine

    @property
    def failure(self) -> EngineDeadError | None:
        """Why the step loop died, or None while it is well."""
        return self._failure

    def submit(self, job: Job, sink: Sink) -> Future[PreparedJob]:
        """Check and tokenize a job here, then hand it to the engine.

        Args:
            job: The request.
            sink: Gets its events, beginning before or after the future is done.

        Returns:
            A future of the accepted job; it holds the error if the engine refuses it.

        Raises:
            InvalidRequestError: The job itself can't be served.
            EngineClosedError: The engine was closed.
            EngineDeadError: Its loop failed.
        """
        prepared = replace(self.engine.prepare(job), arrival_s=time.monotonic())

        def add() -> PreparedJob:
            self.engine.add_request(prepared)
            self._subscribers[prepared.request_id] = _Subscriber(sink, prepared.params.n)
            return prepared

        return self.call(add)

    def abort(self, request_id: str) -> None:
        """End a request soon; its outputs get events with the reason ``abort``."""
        with contextlib.suppress(EngineClosedError, EngineDeadError):
            self.call(lambda: self._dispatch(self.engine.abort(request_id)))

    def call(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Run a function on the engine's thread, between two steps.

        Raises:
            EngineClosedError: The engine was closed.
            EngineDeadError: Its loop failed.
        """
        future: Future[_Result] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        with self._lock:
            self._check_open()
            self._commands.put(command)
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        """End every request with ``abort`` and stop the thread; more calls do nothing."""
        with self._lock:
            already_closing, self._closing = self._closing, True
            if not already_closing:
                self._commands.put(lambda: None)  # wakes the thread
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise EngineClosedError("the engine is closed")

    # On the engine's thread.

    def _run(self) -> None:
        try:
            self._engine = self._build()
        except BaseException as error:
            with self._lock:
                self._closing = True
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(None)
        try:
            self._loop(self._engine)
            self._shut(EngineClosedError("the engine was closed"), "abort")
        except BaseException as error:
            _logger.exception("the engine's loop failed")
            failure = EngineDeadError(f"the engine's loop failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            with self._lock:
                self._failure = failure
            self._shut(failure, "error")
        finally:
            engine, self._engine = self._engine, None
            engine.close()

    def _loop(self, engine: Engine) -> None:
        while not self._closing:
            self._obey(wait=not engine.has_unfinished)
            if not self._closing and engine.has_unfinished:
                self._dispatch(engine.step())

    def _obey(self, *, wait: bool) -> None:
        """Carry out the commands that are there; ``wait`` for one if there are none."""
        with contextlib.suppress(Empty):
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()

    def _dispatch(self, events: Iterable[OutputEvent]) -> None:
        for event in events:
            subscriber = self._subscribers.get(event.request_id)
            if subscriber is None:
                continue
            if event.finish_reason is not None:
                subscriber.num_open -= 1
                if subscriber.num_open == 0:
                    del self._subscribers[event.request_id]
            try:
                subscriber.sink(event)
            except Exception:
                # A client's fault must not reach the others: nobody listens to it any more.
                _logger.exception("the receiver of request %s failed", event.request_id)
                self._subscribers.pop(event.request_id, None)
                assert self._engine is not None
                self._engine.abort(event.request_id)

    def _shut(self, error: PagedMLXError, reason: str) -> None:
        """Tell every open request that it is over, and refuse what is still queued."""
        assert self._engine is not None
        if reason == "abort":
            for request_id in tuple(self._subscribers):
                self._dispatch(self._engine.abort(request_id))
        for request_id, subscriber in tuple(self._subscribers.items()):
            self._dispatch(
                OutputEvent(request_id, index, "", (), reason, None, 0, RequestMetrics(), error)
                for index in range(subscriber.num_open)
            )
        with self._lock:
            self._closing = True
            self._obey(wait=False)  # each finds the engine closed or dead, and its future says so
