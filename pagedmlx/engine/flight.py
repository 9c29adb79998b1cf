"""Flight: runs any number of requests of one caller, a bounded number of them at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from queue import SimpleQueue

from pagedmlx.engine.inputs import PreparedJob
from pagedmlx.engine.outputs import OutputCollector, OutputEvent, RequestOutput, refused_output
from pagedmlx.engine.worker import EngineWorker
from pagedmlx.errors import InvalidRequestError, QueueFullError


class Flight:
    """The requests that one call has in the engine; what comes back is taken on its thread.

    Args:
        worker: Runs them.
        max_in_flight: Most requests that are taken from the source and not yet finished.
    """

    def __init__(self, worker: EngineWorker, max_in_flight: int) -> None:
        self._worker = worker
        self._max_in_flight = max_in_flight
        self._events: SimpleQueue[OutputEvent] = SimpleQueue()
        self._sink = self._events.put
        self._open: dict[str, tuple[PreparedJob, OutputCollector]] = {}
        # Refused because the engine's queue was full; tried again as ours get on.
        self._held: dict[str, PreparedJob] = {}

    def run(
        self, source: Iterable[PreparedJob | RequestOutput]
    ) -> Generator[RequestOutput, None, None]:
        """Yield each request's output as it ends; leaving early aborts those in flight.

        Args:
            source: Taken one by one as there is room. An output stands for a job that was refused
                before it got here, and is passed on.

        Raises:
            EngineClosedError: The engine was closed.
            EngineDeadError: Its loop failed.
        """
        jobs = iter(source)
        has_more = True
        try:
            while True:
                num_taken = len(self._open) + len(self._held)
                # What has come back goes first: nothing finished waits for a slow source.
                if has_more and num_taken < self._max_in_flight and self._events.empty():
                    job = next(jobs, None)
                    has_more = job is not None
                    output = None if job is None else self._take(job)
                elif self._open:
                    output = self._add(self._events.get())
                elif self._held:
                    output = self._retry()
                else:
                    return
                if output is not None:
                    yield output
        finally:
            for request_id in self._open:
                self._worker.abort(request_id, self._sink)

    def _take(self, job: PreparedJob | RequestOutput) -> RequestOutput | None:
        if isinstance(job, RequestOutput):
            return job
        if job.request_id in self._open or job.request_id in self._held:
            error = InvalidRequestError("request_id", f"{job.request_id!r} is in use")
            return refused_output(job.job, error)
        self._submit(job)
        return None

    def _submit(self, job: PreparedJob) -> None:
        self._open[job.request_id] = job, job.collector()
        self._worker.submit(job, self._sink)

    def _retry(self) -> None:
        self._submit(self._held.pop(next(iter(self._held))))

    def _add(self, event: OutputEvent) -> RequestOutput | None:
        job, collector = self._open[event.request_id]
        collector.add(event)
        queue_was_full = isinstance(event.error, QueueFullError)
        if self._held and not queue_was_full:
            self._retry()
        if not collector.finished:
            return None
        del self._open[event.request_id]
        # With nothing of our own in flight, there is nothing to wait for.
        if queue_was_full and self._open:
            self._held[job.request_id] = job
            return None
        return collector.output()
