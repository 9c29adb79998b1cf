"""Engine: requests in, output events out, one step at a time, all on one thread."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from pagedmlx.config import EngineConfig
from pagedmlx.core.pooling import EmbeddingSpec, NoEmbedding
from pagedmlx.core.request import Request
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.scheduler import Scheduler
from pagedmlx.core.sequence import FinishReason, Sequence
from pagedmlx.core.snapshot import EngineSnapshot
from pagedmlx.core.stats import EngineStats, RequestProgress
from pagedmlx.core.step import INVALID_TOKEN, Step, StepResult, TokenLogprobs
from pagedmlx.core.structured import GrammarBackend
from pagedmlx.engine.embedding import EmbeddingSum
from pagedmlx.engine.inputs import EngineLimits, PreparedJob, prepare_job
from pagedmlx.engine.live import LiveOutput, LiveRequest, NewTokens
from pagedmlx.engine.logprobs import LogprobWriter, PromptLogprobs
from pagedmlx.engine.outputs import Job, OutputEvent, RequestMetrics
from pagedmlx.engine.pacer import Pacer
from pagedmlx.engine.request_progress import request_progress
from pagedmlx.errors import NoTokenLeftError, PagedMLXError, RequestFailedError
from pagedmlx.text.answer_style import AnswerStyle
from pagedmlx.text.detokenizer import Detokenizer
from pagedmlx.text.tokenizer import Tokenizer


class Runner(Protocol):
    """Carries out steps in order; the real one is ``ModelRunner``.

    Attributes:
        depth: How many steps may be under way when another one is dispatched.
    """

    depth: int

    def dispatch(self, step: Step) -> None:
        """Start a step behind those under way; unread tokens are known on the device."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step under way and return its tokens."""
        ...

    def rest(self) -> None:
        """No sequence is left: forget what was kept for any."""
        ...

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool's arrays now."""
        ...

    def has_room(self, num_blocks: tuple[int, ...]) -> bool:
        """Whether the pool's arrays hold so many blocks of each group."""
        ...

    def grow(self, num_blocks: tuple[int, ...], num_ahead: tuple[int, ...]) -> None:
        """Make room for so many blocks of each group, and where it can for those ahead at once."""
        ...

    def has_spare(self, num_blocks: tuple[int, ...]) -> bool:
        """Whether ``shrink`` would give anything back."""
        ...

    def shrink(self, num_blocks: tuple[int, ...]) -> None:
        """Give back what lies behind so many blocks of each group."""
        ...

    def close(self) -> None:
        """Give back all memory."""
        ...


class Engine:
    """Runs requests over one model and one pool.

    Not thread-safe, and bound to the thread that made it: MLX's streams are. ``prepare`` alone
    may be called from any thread.

    Args:
        config: Settings.
        scheduler: Decides what runs.
        runner: Runs it.
        tokenizer: The model's.
        limits: What a request may ask for.
        cheap_tokens: Prompt tokens that a step may always compute beside streams.
        block_bytes: Bytes of one block, for statistics.
        pool_bytes: Bytes that the pool may take, for statistics.
        state_bytes: Bytes set aside for recurrent states, for statistics.
        notes: Lines about how the engine was set up, for the user.
        sampling_defaults: Fields of ``SamplingParams`` that the model's maker recommends; front
            ends put them into requests that say nothing about them.
        answer_style: How the model marks reasoning and calls of tools.
        embedding: How the model's embeddings are made, or why it gives none.
        grammars: Compiles structured outputs, on any thread; without it they are refused.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        *,
        cheap_tokens: int,
        block_bytes: int = 0,
        pool_bytes: int = 0,
        state_bytes: int = 0,
        notes: tuple[str, ...] = (),
        sampling_defaults: Mapping[str, float] | None = None,
        answer_style: AnswerStyle | None = None,
        embedding: EmbeddingSpec | NoEmbedding | None = None,
        grammars: GrammarBackend | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.limits = limits
        self.notes = notes
        self.sampling_defaults = dict(sampling_defaults or {})
        self.answer_style = answer_style or AnswerStyle()
        self._embedding = embedding or NoEmbedding("this engine makes none")
        self._scheduler = scheduler
        self._runner = runner
        self._block_bytes = block_bytes
        self._pool_bytes = pool_bytes
        self._state_bytes = state_bytes
        self._grammars = grammars
        self._clock = clock
        self._pacer: Pacer | None = None
        if config.max_stream_gap_ms:
            bound_s = config.max_stream_gap_ms / 1000
            self._pacer = Pacer(bound_s, cheap_tokens, clock)
            scheduler.max_prompt_tokens = cheap_tokens
        self._last_release_s = clock()
        self._live: dict[str, LiveRequest] = {}
        self._under_way: deque[Step] = deque()
        self._random = random.Random(config.seed)

    def prepare(self, job: Job) -> PreparedJob:
        """Check and tokenize a job; safe on any thread.

        Raises:
            InvalidRequestError: A field can't be served; names it and the limit.
        """
        return prepare_job(job, self.tokenizer, self.limits, self._grammars, self._embedding)

    def add_request(self, job: Job | PreparedJob) -> str:
        """Put a request into the waiting queue.

        Returns:
            Its id.

        Raises:
            InvalidRequestError: It can never run; nothing has changed.
            QueueFullError: Too many wait already.
        """
        prepared = self.prepare(job) if isinstance(job, Job) else job
        params = prepared.params
        request = Request(
            request_id=prepared.request_id,
            prompt_token_ids=prepared.packed_prompt,
            params=params,
            stop_token_ids=prepared.stop_token_ids,
            bad_words=prepared.bad_words,
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            priority=prepared.job.priority,
            cache_salt=prepared.job.cache_salt,
            grammar=prepared.grammar,
            pooling=prepared.pooling,
        )
        # A chat answer is a text of its own; a completion goes on from its prompt. What follows a
        # grammar is never the beginning of a text, where some tokenizers drop a blank.
        is_new_text = prepared.job.messages is not None and prepared.grammar is None
        context = () if is_new_text else prepared.prompt_token_ids
        shown = prepared.shown_token_ids
        outputs = [self._new_output(params, context, shown) for _ in range(params.n)]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = PromptLogprobs(self.tokenizer, prepared.prompt_token_ids)
        self._live[request.request_id] = LiveRequest(
            sequences=self._scheduler.add_request(request),
            outputs=outputs,
            prompt_logprobs=prompt_logprobs,
            embedding=self._new_embedding(prepared),
            arrival_s=prepared.arrival_s if prepared.arrival_s is not None else self._clock(),
        )
        return request.request_id

    def abort(self, request_id: str) -> list[OutputEvent]:
        """End what is left of a request; its blocks are free at once. Unknown ids do nothing."""
        events = [self._end(sequence) for sequence in self._scheduler.abort(request_id)]
        self._rest_if_idle()
        return events

    def _new_output(
        self, params: SamplingParams, context: tuple[int, ...], shown: frozenset[int]
    ) -> LiveOutput:
        writer = None
        if params.logprobs is not None:
            writer = LogprobWriter(
                self.tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                shown=shown,
                context=context,
            )
        detokenizer = Detokenizer(self.tokenizer, params, prompt_token_ids=context, shown=shown)
        return LiveOutput(detokenizer, writer)

    def _new_embedding(self, prepared: PreparedJob) -> EmbeddingSum | None:
        wanted, spec = prepared.job.embedding, self._embedding
        if wanted is None or isinstance(spec, NoEmbedding):
            return None
        num_dimensions = wanted.dimensions or spec.num_dimensions
        return EmbeddingSum(spec, num_dimensions, len(prepared.prompt_token_ids))

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is in flight, or a step is still under way."""
        return self._scheduler.has_unfinished or bool(self._under_way)

    def step(self) -> list[OutputEvent]:
        """Start a step and take in the oldest one under way, if that is not to be this one.

        Returns:
            What the step that was taken in added to the outputs.
        """
        step = self._scheduler.schedule()
        if step is not None:
            self._dispatch(step)
        if len(self._under_way) > (0 if step is None else self._runner.depth):
            return self._collect()
        return []

    def _dispatch(self, step: Step) -> None:
        now = self._clock()
        for entry in step.scheduled:
            live = self._live[entry.sequence.request.request_id]
            if live.scheduled_s is None:
                live.scheduled_s = now
        num_blocks = self._scheduler.kv.num_created_blocks
        if not self._runner.has_room(num_blocks):
            self._runner.grow(num_blocks, self._scheduler.num_blocks_ahead())
        if self._pacer is not None:
            self._pacer.start(step)
        self._runner.dispatch(step)
        self._under_way.append(step)

    def _collect(self) -> list[OutputEvent]:
        step = self._under_way.popleft()
        if self._pacer is not None:
            self._pacer.wait()
        result = self._runner.collect()
        if self._pacer is not None:
            self._scheduler.max_prompt_tokens = self._pacer.end(step)
        self._note_prompts(step, result)
        events = self._fail_invalid(step, result)
        for sequence in self._scheduler.update(result):
            if sequence.request.pooling is not None:
                events.append(self._end_embedding(sequence))
            else:
                events.append(self._advance(sequence, result.logprobs.get(sequence.seq_id)))
        self._rest_if_idle()
        if self.config.check_integrity:
            self.check_integrity()
        return events

    def release_due_in_s(self) -> float | None:
        """When ``release_unused`` has something to do next, in seconds from now; None is never."""
        kv = self._scheduler.kv
        # What the pool has grown for may have been aborted before any block of it was created.
        is_spare = kv.can_give_back or self._runner.has_spare(kv.num_created_blocks)
        if not self.config.idle_release_s or not is_spare:
            return None
        return max(0.0, self._last_release_s + self.config.idle_release_s - self._clock())

    def release_unused(self) -> None:
        """Give back the memory of blocks that nobody has needed for ``idle_release_s``, if due."""
        if self.release_due_in_s() == 0.0:
            self._last_release_s = self._clock()
            self._scheduler.kv.give_back_unused()
            # What the pool has grown for may not be in use yet.
            self._runner.shrink(self._scheduler.num_blocks_ahead())

    def stats(self) -> EngineStats:
        """A snapshot of all counts."""
        return dataclasses.replace(
            self._scheduler.stats(),
            block_bytes=self._block_bytes,
            pool_bytes=self._pool_bytes,
            allocated_bytes=self._runner.pool_bytes,
            state_bytes=self._state_bytes,
        )

    def snapshot(self) -> EngineSnapshot:
        """Who holds which block and who waits, beside all counts."""
        return self._scheduler.snapshot(self.stats())

    def progress(self) -> tuple[RequestProgress, ...]:
        """Where each request in flight is."""
        now = self._clock()
        lives = self._live.values()
        return tuple(request_progress(live.sequences, now - live.arrival_s) for live in lives)

    def check_integrity(self) -> None:
        """Assert every invariant of scheduler, tables, pools and this engine's records."""
        self._scheduler.check_integrity()
        alive = {
            sequence.request.request_id
            for sequence in (*self._scheduler.waiting, *self._scheduler.running)
        }
        assert self._live.keys() == alive, "records of requests that are not in flight"

    def close(self) -> None:
        """Give back model and pool; nothing may be called afterwards."""
        self._runner.close()

    def _rest_if_idle(self) -> None:
        if not self.has_unfinished:
            self._runner.rest()

    def _note_prompts(self, step: Step, result: StepResult) -> None:
        if not result.prompt_logprobs and not result.pooled:
            return
        for entry in step.scheduled:
            sequence = entry.sequence
            if sequence.is_finished:
                continue
            live = self._live[sequence.request.request_id]
            if (told := result.prompt_logprobs.get(sequence.seq_id)) is not None:
                assert live.prompt_logprobs is not None
                live.prompt_logprobs.add(told)
            if (hidden := result.pooled.get(sequence.seq_id)) is not None:
                assert live.embedding is not None
                live.embedding.add(hidden)

    def _fail_invalid(self, step: Step, result: StepResult) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for entry in step.scheduled:
            sequence = entry.sequence
            problem = result.problems.get(sequence.seq_id)
            is_invalid = result.sampled.get(sequence.seq_id) == INVALID_TOKEN
            if (is_invalid or problem is not None) and not sequence.is_finished:
                error = _nothing_to_choose(sequence, problem)
                self._scheduler.finish(sequence, FinishReason.ERROR)
                events.append(self._end(sequence, error=error))
        return events

    def _advance(self, sequence: Sequence, told: TokenLogprobs | None) -> OutputEvent:
        """Turn a sequence's newest token into text and see whether it ends there."""
        live = self._live[sequence.request.request_id]
        output = live.outputs[sequence.index]
        if live.first_token_s is None:
            live.first_token_s = self._clock()
        new = NewTokens(token_ids=(sequence.token_ids[-1],))
        try:
            if output.logprobs is not None and told is not None:
                new.logprobs = (output.logprobs.write(told),)
            # The token that ends an output is not part of its text, unless it is to be.
            if not _is_end(sequence) or sequence.request.params.include_stop_str_in_output:
                new.text = output.detokenizer.add(new.token_ids)
        except Exception as problem:
            self._scheduler.finish(sequence, FinishReason.ERROR)
            return self._end(sequence, new, error=_text_failed(sequence, problem))
        if output.detokenizer.stop_reason is not None:
            self._scheduler.finish(sequence, FinishReason.STOP)
        if sequence.is_finished:
            return self._end(sequence, new)
        return self._event(sequence, new)

    def _end_embedding(self, sequence: Sequence) -> OutputEvent:
        live = self._live[sequence.request.request_id]
        assert live.embedding is not None
        live.first_token_s = self._clock()
        vector = live.embedding.whole()
        if not np.isfinite(vector).all():
            return self._end(sequence, error=_not_finite(sequence, "hidden states"))
        return self._end(sequence, NewTokens(embedding=vector))

    def _end(
        self,
        sequence: Sequence,
        new: NewTokens | None = None,
        *,
        error: PagedMLXError | None = None,
    ) -> OutputEvent:
        """Flush a finished output's text, drop its record and make its last event."""
        live = self._live[sequence.request.request_id]
        output = live.outputs[sequence.index]
        new = new or NewTokens()
        if error is None:
            try:
                new.text += output.detokenizer.finish()
            except Exception as problem:  # one request's text must not end the others'
                error = _text_failed(sequence, problem)
        reason, stop_reason = sequence.finish_reason, output.detokenizer.stop_reason
        if error is not None:
            reason, stop_reason = FinishReason.ERROR, None
        elif stop_reason is not None:
            reason = FinishReason.STOP  # also when the last token allowed completed it
        elif reason is FinishReason.STOP:
            stop_reason = _named(sequence)
        assert reason is not None
        output.finished = True
        event = self._event(sequence, new, reason.value, stop_reason, error)
        if all(each.finished for each in live.outputs):
            del self._live[sequence.request.request_id]
        return event

    def _event(
        self,
        sequence: Sequence,
        new: NewTokens,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        error: PagedMLXError | None = None,
    ) -> OutputEvent:
        live = self._live[sequence.request.request_id]
        since = live.arrival_s
        prompt_logprobs = None
        if live.prompt_logprobs is not None and sequence.index == 0 and new.token_ids:
            prompt_logprobs, live.prompt_logprobs = live.prompt_logprobs.whole(), None
        return OutputEvent(
            request_id=sequence.request.request_id,
            index=sequence.index,
            text=new.text,
            token_ids=new.token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=sequence.num_cached_tokens,
            metrics=RequestMetrics(
                queue_s=None if live.scheduled_s is None else live.scheduled_s - since,
                ttft_s=None if live.first_token_s is None else live.first_token_s - since,
                total_s=self._clock() - since,
                num_preemptions=sum(each.num_preemptions for each in live.sequences),
            ),
            error=error,
            logprobs=new.logprobs if live.outputs[sequence.index].logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            embedding=new.embedding,
        )


def _is_end(sequence: Sequence) -> bool:
    """Whether its newest token is no text, but ended it."""
    is_stopped = sequence.finish_reason is FinishReason.STOP
    return is_stopped and sequence.token_ids[-1] in sequence.request.stop_token_ids


def _nothing_to_choose(sequence: Sequence, problem: NoTokenLeftError | None) -> RequestFailedError:
    params = sequence.request.params
    name = f"request {sequence.request.request_id}"
    if problem is not None:
        return NoTokenLeftError(f"{name}: {problem}", hint=problem.hint)
    if params.structured is not None:
        return NoTokenLeftError(
            f"{name}: no token is left to choose from",
            hint="the grammar allows only what allowed_token_ids or bad_words forbid here",
        )
    if params.bad_words or params.allowed_token_ids is not None or params.min_tokens:
        return NoTokenLeftError(
            f"{name}: no token is left to choose from",
            hint="allowed_token_ids, bad_words or min_tokens forbid every token here",
        )
    return _not_finite(sequence, "logits")


def _not_finite(sequence: Sequence, what: str) -> RequestFailedError:
    return RequestFailedError(
        f"request {sequence.request.request_id}: the model's {what} are not finite",
        hint="the weights are damaged or their type is too narrow; try float32",
    )


def _text_failed(sequence: Sequence, problem: Exception) -> RequestFailedError:
    error = RequestFailedError(
        f"request {sequence.request.request_id}: detokenizing failed: "
        f"{type(problem).__name__}: {problem}"
    )
    error.__cause__ = problem
    return error


def _named(sequence: Sequence) -> int | None:
    """The stop token that the request itself named, or None for the model's own."""
    token = sequence.token_ids[-1]
    return token if token in sequence.request.params.stop_token_ids else None
