"""LLM: the offline Python interface; it runs an engine on a thread and waits for it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from numbers import Integral
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeGuard, cast

from pagedmlx.config import EngineConfig
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.stats import EngineStats
from pagedmlx.engine.flight import Flight
from pagedmlx.engine.inputs import PreparedJob
from pagedmlx.engine.load import load_engine
from pagedmlx.engine.outputs import (
    EmbeddingParams,
    Job,
    Messages,
    OutputEvent,
    RequestOutput,
    refused_output,
)
from pagedmlx.engine.turn import Turn
from pagedmlx.engine.worker import EngineWorker
from pagedmlx.errors import InvalidRequestError
from pagedmlx.progress import ProgressCallback

if TYPE_CHECKING:
    from pagedmlx.engine.embedding import Vector

Prompt = str | Sequence[int]
"""Text, or token ids."""

_MAX_IN_FLIGHT = 256


class LLM:
    """One model, for as many prompts at a time as its block pool holds.

    Args:
        model: ``smollm2``, the path of a folder or GGUF file, or a Hugging Face id.
        config: All settings at once; then give no others.
        on_progress: Told what is being loaded; called on another thread.
        settings: Fields of ``EngineConfig``, one by one.

    Attributes:
        config: The settings in force.
        load_notes: Lines about how the engine was set up: device, BLAS, attention, pool.
        has_chat_template: Whether the model can be given messages.
        sampling_defaults: What the model's maker recommends, by fields of ``SamplingParams``.
        default_sampling_params: What is used when a call gives none: those, else the defaults
            of ``SamplingParams``.

    Raises:
        PagedMLXError: The model can't be loaded, or a setting is off.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        on_progress: ProgressCallback | None = None,
        **settings: Any,
    ) -> None:
        if config is not None and (model is not None or settings):
            raise InvalidRequestError("config", "give either a config or single settings")
        if config is None:
            if isinstance(model, os.PathLike):
                model = os.fspath(model)
            config = EngineConfig(**settings if model is None else {"model": model, **settings})
        self.config = config
        self._worker = EngineWorker(partial(load_engine, config), on_progress)
        self._finalizer = weakref.finalize(self, self._worker.close)
        try:
            self._worker.start().result()
        except BaseException:
            self._finalizer()
            raise
        self.load_notes = list(self._worker.engine.notes)
        self.sampling_defaults = self._worker.engine.sampling_defaults
        self.default_sampling_params = SamplingParams(**cast("Any", self.sampling_defaults))
        self.has_chat_template = self._worker.engine.tokenizer.has_chat_template

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Complete prompts; returns when all are done, in the order given.

        Args:
            prompts: One or many, as text or token ids.
            sampling_params: For all, or one each; default ``default_sampling_params``.
            priority: Larger is served first.

        Raises:
            InvalidRequestError: A prompt can't be served; none is run then.
        """
        listed = _as_list(prompts)
        params = self._one_each(sampling_params, len(listed))
        return self._run_all(
            [
                Job(
                    prompt=prompt if isinstance(prompt, str) else None,
                    prompt_token_ids=None if isinstance(prompt, str) else prompt,
                    sampling_params=each,
                    priority=priority,
                )
                for prompt, each in zip(listed, params, strict=True)
            ]
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, written out by the model's chat template.

        Each output has its ``message``: content, reasoning and calls told apart. Its ``text`` is
        all that the model wrote, with the marks around reasoning and calls.

        Args:
            messages: One conversation, or many.
            sampling_params: For all, or one each; default ``default_sampling_params``.
            priority: Larger is served first.
            chat_template_kwargs: Further variables for the chat template.
            tools: What the model may call, in OpenAI's form.
            tool_choice: ``auto``, ``none``, ``required`` or one tool, in OpenAI's form.
            parallel_tool_calls: Whether several calls may be made at once.
            reasoning_effort: ``none`` to ``max``.

        Raises:
            InvalidRequestError: A conversation can't be served; none is run then.
        """
        listed = [messages] if _is_conversation(messages) else list(messages)
        params = self._one_each(sampling_params, len(listed))
        engine = self._worker.engine
        turns = [
            Turn.read(
                engine,
                cast("Messages", conversation),
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=parallel_tool_calls,
                reasoning_effort=reasoning_effort,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in listed
        ]
        jobs = [
            turn.job(engine, each, priority=priority)
            for turn, each in zip(turns, params, strict=True)
        ]
        prepared = [self._worker.prepare(job) for job in jobs]
        outputs = self._run_prepared(prepared)
        return [
            turn.with_messages(engine, each, output)
            for turn, each, output in zip(turns, prepared, outputs, strict=True)
        ]

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        priority: int = 0,
    ) -> list[Vector]:
        """Embeddings of texts, in the order given.

        Args:
            texts: One or many, as text or token ids. Text ends as the model's tokenizer ends it;
                instructions in front of it are the caller's to write.
            dimensions: Only so many, for models that are made for it.
            priority: Larger is served first.

        Returns:
            (D,) float32 for each text.

        Raises:
            InvalidRequestError: The model gives no embeddings, or a text can't be served; nothing
                is run then.
        """
        wanted = EmbeddingParams(dimensions)
        outputs = self._run_all(
            Job(
                prompt=text if isinstance(text, str) else None,
                prompt_token_ids=None if isinstance(text, str) else text,
                embedding=wanted,
                priority=priority,
            )
            for text in _as_list(texts)
        )
        return [cast("Vector", output.embedding) for output in outputs]

    def stream(
        self,
        prompt_or_messages: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """Run one request and yield its state as it grows; leaving the loop aborts it.

        A list of messages is a conversation, anything else a prompt to complete.

        Raises:
            PagedMLXError: The request is refused or fails.
        """
        params = sampling_params or self.default_sampling_params
        prompt = messages = token_ids = None
        if isinstance(prompt_or_messages, str):
            prompt = prompt_or_messages
        elif _is_conversation(prompt_or_messages):
            messages = prompt_or_messages
        else:
            token_ids = cast("Sequence[int]", prompt_or_messages)
        job = Job(
            prompt=prompt,
            messages=messages,
            prompt_token_ids=token_ids,
            sampling_params=params,
            priority=priority,
            chat_template_kwargs=chat_template_kwargs or {},
        )
        events: SimpleQueue[OutputEvent] = SimpleQueue()
        sink = events.put
        prepared = self._worker.prepare(job)
        collector = prepared.collector()
        try:
            self._worker.submit(prepared, sink)
            while not collector.finished:
                event = events.get()
                collector.add(event)
                if event.error is not None:
                    raise event.error
                yield collector.output(event.index)
        finally:
            if not collector.finished:
                self._worker.abort(prepared.request_id, sink)

    def generate_iter(
        self, jobs: Iterable[Job], *, max_in_flight: int = _MAX_IN_FLIGHT
    ) -> Iterator[RequestOutput]:
        """Run any number of jobs in bounded memory, yielding each as it ends.

        Leaving the loop aborts those in flight.

        Args:
            jobs: Taken one by one as there is room, on the caller's thread.
            max_in_flight: Most jobs that are taken and not yet finished.

        Returns:
            Finished outputs, in the order in which they end; one that was refused or failed has
            its ``error`` set.

        Raises:
            EngineClosedError: The engine was closed; raised while iterating.
            EngineDeadError: Its loop failed; raised while iterating.
        """
        if max_in_flight < 1:
            raise InvalidRequestError("max_in_flight", f"{max_in_flight} must be at least 1")
        return Flight(self._worker, max_in_flight).run(self._prepare_each(jobs))

    def stats(self) -> EngineStats:
        """A snapshot of all counts, between two steps."""
        return self._worker.call(self._worker.engine.stats).result()

    def check_integrity(self) -> None:
        """Assert every invariant of the engine, between two steps.

        Raises:
            AssertionError: One is broken; that is a fault of pagedmlx.
        """
        self._worker.call(self._worker.engine.check_integrity).result()

    def close(self) -> None:
        """Abort what runs, stop the engine and free its memory; more calls do nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare_each(self, jobs: Iterable[Job]) -> Iterator[PreparedJob | RequestOutput]:
        for job in jobs:
            try:
                prepared = self._worker.prepare(job)
            except InvalidRequestError as error:
                yield refused_output(job, error)
            else:
                yield prepared

    def _one_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_sampling_params] * count
        if len(params) != count:
            raise InvalidRequestError(
                "sampling_params",
                f"{len(params)} entries for {count} prompts; give one each or one",
            )
        return list(params)

    def _run_all(self, jobs: Iterable[Job]) -> list[RequestOutput]:
        # All are checked before any is run.
        return self._run_prepared([self._worker.prepare(job) for job in jobs])

    def _run_prepared(self, prepared: Sequence[PreparedJob]) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        with closing(Flight(self._worker, _MAX_IN_FLIGHT).run(prepared)) as finished:
            for output in finished:
                if output.error is not None:
                    raise output.error
                outputs[output.request_id] = output
        return [outputs[job.request_id] for job in prepared]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise InvalidRequestError("prompts", f"{kind} is not text, token ids or a list of them")
    listed: list[Any] = list(prompts)
    # Those of arrays are no int, which is quicker to ask for.
    num_token_ids = sum(isinstance(each, (int, Integral)) for each in listed)
    if 0 < num_token_ids < len(listed):
        raise InvalidRequestError("prompts", "mixes token ids with whole prompts")
    return [listed] if num_token_ids else listed


def _is_conversation(value: object) -> TypeGuard[Messages]:
    """Whether it is a list of messages, not of conversations or of token ids."""
    if not isinstance(value, Iterable):
        return False
    first: object = next(iter(cast("Iterable[object]", value)), None)
    return isinstance(first, Mapping)
