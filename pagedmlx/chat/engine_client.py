"""EngineClient: answers from an engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial

from pagedmlx.chat.client import ChatRequest, Delta
from pagedmlx.config import EngineConfig
from pagedmlx.core.snapshot import EngineSnapshot
from pagedmlx.engine.async_engine import AsyncEngine
from pagedmlx.engine.load import load_engine
from pagedmlx.engine.outputs import Job, OutputEvent
from pagedmlx.engine.worker import EngineWorker
from pagedmlx.errors import EngineClosedError, PagedMLXError
from pagedmlx.progress import ProgressCallback

_CLOSE_S = 1.0
"""A step can't be interrupted, and nobody should wait long for one to leave."""

MakeWorker = Callable[[ProgressCallback], EngineWorker]


class EngineClient:
    """A ``ChatClient`` over an engine that it starts and owns.

    Args:
        config: Names the model.
        make_worker: Makes the worker that loads it; for tests.
    """

    def __init__(self, config: EngineConfig, make_worker: MakeWorker | None = None) -> None:
        self.name = config.model
        self.max_len: int | None = None
        self.notes: tuple[str, ...] = ()
        self.defaults: Mapping[str, float] = {}
        self._config = config
        self._make_worker = make_worker
        self._worker: EngineWorker | None = None
        self._engine: AsyncEngine | None = None
        self._is_fetching = False

    async def start(self, on_progress: ProgressCallback) -> None:
        """Load the model, after fetching it if need be."""
        if self._make_worker is None:
            await self._fetch(on_progress)
            load = partial(load_engine, self._config.for_streams())
            self._worker = EngineWorker(load, on_progress)
        else:
            self._worker = self._make_worker(on_progress)
        try:
            engine = await AsyncEngine.from_worker(self._worker)
        except ImportError as error:
            raise PagedMLXError(
                f"MLX can't be loaded: {error}",
                hint="on Linux install a backend with it: pip install 'pagedmlx[cpu]'",
            ) from error
        self._engine = engine
        self.max_len = engine.limits.max_len
        self.notes = engine.notes
        self.defaults = engine.sampling_defaults

    async def answer(self, request: ChatRequest) -> AsyncGenerator[Delta]:
        """Answer a question; cancelling aborts the request."""
        engine = self._engine
        if engine is None:
            raise EngineClosedError("the model is not loaded")
        job = Job(
            messages=request.messages,
            sampling_params=request.params,
            request_id=request.request_id,
        )
        prepared = await engine.prepare(job)
        events: asyncio.Queue[OutputEvent] = asyncio.Queue()
        abort = await engine.submit(prepared, events.put_nowait)
        open_outputs = set(range(request.params.n))
        num_tokens = [0] * request.params.n
        try:
            while open_outputs:
                event = await events.get()
                if event.error is not None:
                    raise event.error
                num_tokens[event.index] += len(event.token_ids)
                if event.finish_reason is not None:
                    open_outputs.discard(event.index)
                yield Delta(
                    index=event.index,
                    text=event.text,
                    finish=event.finish_reason,
                    num_prompt_tokens=len(prepared.prompt_token_ids),
                    num_cached_tokens=event.num_cached_tokens if event.index == 0 else None,
                    num_output_tokens=num_tokens[event.index],
                    ttft_s=event.metrics.ttft_s if event.metrics is not None else None,
                )
        finally:
            abort()

    async def snapshot(self) -> EngineSnapshot | None:
        """Who holds which block, between two steps; None before and after the engine's life.

        Raises:
            EngineDeadError: It has failed.
        """
        if self._engine is not None:
            with contextlib.suppress(EngineClosedError):
                return await self._engine.snapshot()
        return None

    async def close(self) -> bool:
        """Stop the engine; a thread that is deep in a step or in a download is left behind."""
        self._engine = None
        worker, self._worker = self._worker, None
        if worker is None:
            return not self._is_fetching
        await asyncio.to_thread(worker.close, _CLOSE_S)
        return not worker.is_alive

    async def _fetch(self, on_progress: ProgressCallback) -> None:
        """Find the model before MLX is imported, so that a wrong name is told at once."""
        from pagedmlx import hub

        config = self._config
        self._is_fetching = True
        try:
            await asyncio.to_thread(
                hub.resolve, config.model, config.revision, config.offline, on_progress
            )
        except asyncio.CancelledError:
            # Its thread goes on for a while.
            raise
        except Exception:
            self._is_fetching = False
            raise
        self._is_fetching = False
