"""What goes into the engine and what comes out: Job, OutputEvent and RequestOutput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.structured import StructuredOutputs
from pagedmlx.errors import InvalidRequestError, PagedMLXError
from pagedmlx.text.answer_parts import AssistantMessage

if TYPE_CHECKING:
    from pagedmlx.engine.embedding import Vector

Messages = Sequence[Mapping[str, Any]]
"""A conversation: objects with ``role`` and ``content``, as in OpenAI's chat API."""


@dataclass(frozen=True, slots=True)
class EmbeddingParams:
    """Asks for a prompt's embedding in place of outputs.

    Attributes:
        dimensions: How many of its first dimensions; None is all.

    Raises:
        InvalidRequestError: A value is of the wrong type.
    """

    dimensions: int | None = None

    def __post_init__(self) -> None:
        value: object = self.dimensions
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidRequestError("dimensions", f"{value!r} is not a whole number")


@dataclass(frozen=True, slots=True)
class Job:
    """One request as a caller states it; exactly one of the three prompt forms is given.

    Attributes:
        prompt: Text to go on from.
        messages: A conversation, written out by the model's chat template.
        prompt_token_ids: Token ids to go on from.
        sampling_params: How to choose tokens and when to stop.
        request_id: Unique among the requests in flight; None makes one up.
        priority: Larger is served first.
        cache_salt: Cached prefixes are shared only among requests of the same salt.
        chat_template_kwargs: Further variables for the chat template.
        shown_tokens: Special tokens that stay in the text though others are left out.
        grammar_parts: What its grammar is made of, by what an error should call each: if the whole
            can't be compiled, these are tried one by one.
        embedding: The prompt's embedding is wanted, and nothing is sampled.
    """

    prompt: str | None = None
    messages: Messages | None = None
    prompt_token_ids: Sequence[int] | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    priority: int = 0
    cache_salt: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    shown_tokens: tuple[str, ...] = ()
    grammar_parts: Mapping[str, StructuredOutputs] = field(
        default_factory=dict[str, StructuredOutputs]
    )
    embedding: EmbeddingParams | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times and fortunes of one request so far.

    Attributes:
        queue_s: From arrival until its first tokens were scheduled; None while it waits.
        ttft_s: From arrival until its first output token; None before that.
        total_s: From arrival until now, or until its end.
        num_preemptions: How often its sequences lost their blocks.
    """

    queue_s: float | None = None
    ttft_s: float | None = None
    total_s: float = 0.0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model found one token.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability; minus infinity if it is impossible.
        rank: 1 for the most likely token.
        text: Its bytes as text; what is no whole character is U+FFFD.
        bytes: What it adds to the text; for a special token that is left out its name.
    """

    token_id: int
    logprob: float
    rank: int
    text: str
    bytes: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """What is told of one position: of the token that is there, and of the most likely ones.

    They come from the model's logits alone: no penalty, bias, temperature or filter is in them.

    Attributes:
        token: The token that is there.
        top: The most likely ones, likeliest first, as many as asked for. ``token`` may be among
            them.
        start: Characters of the text before the token. A token with a part of a character begins
            and ends with the whole character.
        end: Characters up to its end; equal to ``start`` for a token that is left out.
    """

    token: TokenLogprob
    top: tuple[TokenLogprob, ...]
    start: int
    end: int


def shown_logprobs(
    positions: Sequence[PositionLogprobs], num_chars: int, *, is_whole: bool
) -> tuple[PositionLogprobs, ...]:
    """Those of the tokens that a text is made of, a stop string's and special ones left out.

    Args:
        positions: All of an output, or those after the ones that were shown before.
        num_chars: Length of the output's text so far.
        is_whole: Whether no more text will come; else a token waits until all of it is there.
    """
    return tuple(
        each
        for each in positions
        if each.start < each.end and (each.start if is_whole else each.end - 1) < num_chars
    )


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """What one step added to one output of a request.

    Attributes:
        request_id: The request.
        index: Which of its outputs.
        text: New text that is safe to show.
        token_ids: New tokens.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error`` when the output ended here.
        stop_reason: The stop string or stop token id that ended it, if one did.
        num_cached_tokens: Prompt tokens that were not computed, but shared.
        metrics: Of the whole request; None from an engine that can say no more.
        error: Why the output ended with ``error``.
        logprobs: One for each of ``token_ids``; None if the request did not ask.
        prompt_logprobs: One for each prompt token, None for the first one; only in the first event
            with a token of the output 0, and only if the request asked.
        embedding: (D,) float32, in the only event of a request for one.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: PagedMLXError | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    embedding: Vector | None = field(default=None, compare=False)

    @classmethod
    def failed(cls, request_id: str, index: int, error: PagedMLXError) -> OutputEvent:
        """The last event of an output that the engine can say no more about."""
        return cls(request_id, index, finish_reason="error", error=error)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's outputs.

    Attributes:
        index: 0 to n - 1.
        text: All text so far.
        delta: What the last step added to it.
        token_ids: All tokens so far, an end-of-sequence token included.
        finish_reason: None while it goes on, then ``stop``, ``length``, ``abort`` or ``error``.
        stop_reason: The stop string or token id that ended it; None for the model's own end.
        logprobs: One for each of ``token_ids``; None if the request did not ask.
        message: The text taken apart into content, reasoning and calls of tools; None if nobody
            has done so.
    """

    index: int
    text: str = ""
    delta: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    message: AssistantMessage | None = None

    @property
    def shown_logprobs(self) -> tuple[PositionLogprobs, ...]:
        """Those of the tokens that ``text`` is made of; see the function of this name."""
        return shown_logprobs(
            self.logprobs or (), len(self.text), is_whole=self.finish_reason is not None
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's state: its prompt and all its outputs.

    Attributes:
        request_id: The request.
        prompt: The prompt's text; None if it came as tokens or messages.
        prompt_token_ids: The prompt's tokens; empty if it was refused before that.
        outputs: One entry for each of the n outputs.
        finished: Whether all of them have ended.
        num_cached_tokens: Prompt tokens that the first output shared instead of computing them.
        metrics: Times and preemptions.
        error: Set when the request was refused or failed; its outputs are what came before.
        prompt_logprobs: One for each prompt token, None for the first one, which nothing comes
            before; None until the first output token, and if the request did not ask. Places are
            those in the prompt's decode, special tokens not left out.
        embedding: (D,) float32, if that was asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: PagedMLXError | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    embedding: Vector | None = field(default=None, compare=False)


class OutputCollector:
    """Adds up a request's events on the caller's side, so that the engine need not.

    Args:
        request_id: The request.
        prompt: Its text, if it had one.
        prompt_token_ids: Its tokens.
        n: How many outputs it has.
    """

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: tuple[int, ...], n: int
    ) -> None:
        self.request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._tokens: list[list[int]] = [[] for _ in range(n)]
        self._logprobs: list[list[PositionLogprobs] | None] = [None] * n
        self._prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
        self._last: list[OutputEvent | None] = [None] * n
        self._num_cached_tokens = 0
        self._metrics = RequestMetrics()
        self._error: PagedMLXError | None = None
        self._embedding: Vector | None = None

    @property
    def finished(self) -> bool:
        """Whether every output has ended."""
        return all(event is not None and event.finish_reason for event in self._last)

    def add(self, event: OutputEvent) -> None:
        """Take in one event of the request."""
        self._texts[event.index].append(event.text)
        self._tokens[event.index].extend(event.token_ids)
        self._last[event.index] = event
        self._error = self._error or event.error
        if event.logprobs is not None:
            found = self._logprobs[event.index]
            if found is None:
                found = self._logprobs[event.index] = []
            found.extend(event.logprobs)
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        if event.embedding is not None:
            self._embedding = event.embedding
        if event.metrics is None:
            return
        self._metrics = event.metrics
        if event.index == 0:
            self._num_cached_tokens = event.num_cached_tokens

    def output(self, changed: int | None = None) -> RequestOutput:
        """The request as it stands.

        Args:
            changed: The output whose last event's text is the ``delta``; the others' are empty.
        """
        outputs: list[CompletionOutput] = []
        for index, last in enumerate(self._last):
            if len(self._texts[index]) > 1:
                self._texts[index] = ["".join(self._texts[index])]
            outputs.append(
                CompletionOutput(
                    index=index,
                    text="".join(self._texts[index]),
                    delta=last.text if last is not None and index == changed else "",
                    token_ids=tuple(self._tokens[index]),
                    finish_reason=last.finish_reason if last is not None else None,
                    stop_reason=last.stop_reason if last is not None else None,
                    logprobs=None if (found := self._logprobs[index]) is None else tuple(found),
                )
            )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=tuple(outputs),
            finished=self.finished,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._metrics,
            error=self._error,
            prompt_logprobs=self._prompt_logprobs,
            embedding=self._embedding,
        )


def refused_output(job: Job, error: PagedMLXError) -> RequestOutput:
    """The output of a job that could not even become a request."""
    return RequestOutput(
        request_id=job.request_id or "",
        prompt=job.prompt,
        prompt_token_ids=(),
        outputs=(),
        finished=True,
        error=error,
    )
