"""EngineWorker: the one thread that owns an engine, and the only way to it from other threads."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from pagedmlx.engine.frames import clear_frames
from pagedmlx.engine.outputs import Job, OutputEvent
from pagedmlx.errors import EngineClosedError, EngineDeadError, PagedMLXError, RequestFailedError
from pagedmlx.progress import ProgressCallback

if TYPE_CHECKING:
    from pagedmlx.engine.engine import Engine
    from pagedmlx.engine.inputs import PreparedJob

Sink = Callable[[OutputEvent], None]
"""Receives a request's events, on the engine's thread; must be quick and must not raise."""

_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)
# Who wants to read it sets logging up; others get the errors themselves, and no traceback.
_logger.addHandler(logging.NullHandler())


@dataclass(eq=False, slots=True)
class _Subscriber:
    sink: Sink
    open_outputs: set[int]


class EngineWorker:
    """Runs an engine on a thread of its own, from loading to closing.

    All methods are safe on any thread. Every output of a submitted request gets a last event,
    whatever happens to the engine.

    Args:
        build: Makes the engine; called on the worker's thread, with a callback for progress.
        on_progress: Told what is being loaded, on the worker's thread.
    """

    def __init__(
        self,
        build: Callable[[ProgressCallback], Engine],
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self._build = build
        self._on_progress = on_progress
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
        # Nobody who waits for it may cancel the loading itself.
        self._loaded.set_running_or_notify_cancel()
        # The thread must end before the interpreter takes MLX down under it.
        atexit.register(self.close)
        self._thread.start()
        return self._loaded

    @property
    def engine(self) -> Engine:
        """The engine; from another thread only its constants and ``prepare`` may be used."""
        self._check_open()
        assert self._engine is not None, "the engine is still loading"
        return self._engine

    @property
    def is_alive(self) -> bool:
        """Whether its thread still runs; after ``close`` it may, deep in a step or in loading."""
        return self._thread.is_alive()

    @property
    def failure(self) -> EngineDeadError | None:
        """Why the step loop died, or None while it is well."""
        return self._failure

    def prepare(self, job: Job) -> PreparedJob:
        """Check and tokenize a job, on the caller's thread.

        Raises:
            InvalidRequestError: The job itself can't be served.
            EngineClosedError: The engine was closed.
            EngineDeadError: Its loop failed.
        """
        arrival_s = time.monotonic()
        return replace(self.engine.prepare(job), arrival_s=arrival_s)

    def submit(self, prepared: PreparedJob, sink: Sink) -> Future[None]:
        """Hand a job to the engine; if the engine refuses it, its events say so.

        Returns:
            Done when the engine has taken the job; its exception is why it was refused.

        Raises:
            EngineClosedError: The engine was closed; there will be no events.
            EngineDeadError: Its loop failed; there will be no events.
        """
        subscriber = _Subscriber(sink, set(range(prepared.params.n)))

        def add() -> None:
            try:
                self.engine.add_request(prepared)
            except PagedMLXError as error:
                _fail(prepared.request_id, subscriber, error)
                raise
            except Exception as problem:
                _logger.exception("request %s can't be added", prepared.request_id)
                error = RequestFailedError(f"request {prepared.request_id}: {problem!r}")
                _fail(prepared.request_id, subscriber, error)
                raise error from problem
            else:
                self._subscribers[prepared.request_id] = subscriber

        return self.call(add)

    def abort(self, request_id: str, sink: Sink) -> None:
        """End a request soon, if it still runs; its outputs get events with the reason ``abort``.

        Args:
            request_id: The request.
            sink: The one that it was submitted with: ids can be used again.
        """

        def end() -> None:
            subscriber = self._subscribers.get(request_id)
            if subscriber is not None and subscriber.sink == sink:
                self._dispatch(self.engine.abort(request_id))

        with contextlib.suppress(EngineClosedError, EngineDeadError):
            self.call(end)

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
        if threading.current_thread() is self._thread:
            return
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            atexit.unregister(self.close)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise _copy(self._failure)
        if self._closing:
            raise EngineClosedError("the engine is closed")
        if self._thread.ident is not None and not self._thread.is_alive():
            raise EngineClosedError(
                "the engine's thread is not in this process",
                hint="make the engine after the fork, or start processes with spawn",
            )

    # On the engine's thread.

    def _run(self) -> None:
        try:
            self._engine = self._build(self._report)
        except BaseException as error:
            self._refuse_commands()
            clear_frames(error)
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(None)
        try:
            self._loop(self._engine)
            for request_id in tuple(self._subscribers):
                self._dispatch(self._engine.abort(request_id))
        except BaseException as error:
            self._die(error)
        finally:
            self._refuse_commands()
            engine, self._engine = self._engine, None
            engine.close()

    def _report(self, what: str, share: float | None) -> None:
        """Pass on what is being loaded; loading ends here when it is no longer wanted."""
        if self._closing:
            raise EngineClosedError("the engine was closed while it was loading")
        if self._on_progress is not None:
            self._on_progress(what, share)

    def _loop(self, engine: Engine) -> None:
        while not self._closing:
            if engine.has_unfinished:
                self._obey(wait=False)
            else:
                self._obey(wait=True, timeout_s=engine.release_due_in_s())
            if not self._closing and engine.has_unfinished:
                self._dispatch(engine.step())
            engine.release_unused()

    def _die(self, error: BaseException) -> None:
        """Tell every open request that the loop has failed."""
        _logger.error("the engine's loop failed", exc_info=error)
        failure = EngineDeadError(f"the engine's loop failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        # Its frames hold the pool and the model.
        clear_frames(error)
        with self._lock:
            self._failure = failure
        while self._subscribers:
            _fail(*self._subscribers.popitem(), _copy(failure))

    def _refuse_commands(self) -> None:
        """Let nothing more in; what is queued finds the engine closed or dead, and says so."""
        with self._lock:
            self._closing = True
        self._obey(wait=False)

    def _obey(self, *, wait: bool, timeout_s: float | None = None) -> None:
        """Carry out the commands that are there; ``wait`` for one if there are none."""
        with contextlib.suppress(Empty):
            self._commands.get(block=wait, timeout=timeout_s)()
            while True:
                self._commands.get_nowait()()

    def _dispatch(self, events: Iterable[OutputEvent]) -> None:
        for event in events:
            subscriber = self._subscribers.get(event.request_id)
            if subscriber is None:
                continue
            if event.finish_reason is not None:
                subscriber.open_outputs.discard(event.index)
                if not subscriber.open_outputs:
                    del self._subscribers[event.request_id]
            if not _tell(subscriber, event):
                # Nobody listens to it any more; the others must not notice.
                self._subscribers.pop(event.request_id, None)
                assert self._engine is not None
                self._engine.abort(event.request_id)


def _copy(failure: EngineDeadError) -> EngineDeadError:
    """One for each who raises it: an exception keeps every frame that it passes through."""
    error = EngineDeadError(str(failure), hint=failure.hint)
    error.__cause__ = failure.__cause__
    return error


def _tell(subscriber: _Subscriber, event: OutputEvent) -> bool:
    """Hand over an event; False if its receiver failed."""
    try:
        subscriber.sink(event)
    except Exception:
        _logger.exception("the receiver of request %s failed", event.request_id)
        return False
    return True


def _fail(request_id: str, subscriber: _Subscriber, error: PagedMLXError) -> None:
    """End whatever outputs of a request are open."""
    for index in sorted(subscriber.open_outputs):
        _tell(subscriber, OutputEvent.failed(request_id, index, error))
