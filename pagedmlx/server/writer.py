"""Pieces of answers, their token counts, and Writer: what chat and completions differ in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar, Protocol

from pagedmlx.engine.inputs import PreparedJob
from pagedmlx.engine.outputs import (
    OutputEvent,
    PositionLogprobs,
    shown_logprobs,
)
from pagedmlx.text.answer_parser import AnswerParser, join_parts
from pagedmlx.text.answer_parts import AnswerPart, TextPart


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event adds to one choice of a stream; of a whole answer, all of the choice.

    Attributes:
        job: Number of the job that the choice belongs to.
        index: Of the choice.
        is_first: Whether nothing of the choice has been sent yet.
        text: New text.
        logprobs: Of the tokens that have been shown whole by it; None if nobody asked.
        finish_reason: Set at the choice's end.
        stop_reason: The stop string or token that ended it.
        prompt_logprobs: Of the job's prompt, with the choice's first piece, if they were asked for.
        parts: The new text as reasoning, text and calls of tools, for endpoints that tell them
            apart.
    """

    job: int
    index: int
    is_first: bool
    text: str
    logprobs: tuple[PositionLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    parts: tuple[AnswerPart, ...] = ()


class Writer(Protocol):
    """Writes choices in the shape of one endpoint.

    Attributes:
        kind: The ``object`` of a whole answer.
        chunk_kind: The ``object`` of one event of a stream.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def choice(self, piece: Piece) -> dict[str, Any]:
        """One choice of a whole answer; the piece is all of it."""
        ...

    def extras(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What a whole answer has beside its choices."""
        ...

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The choice, as one or several chunks of a stream show it."""
        ...


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """All pieces of a choice as one."""
    first, last = pieces[0], pieces[-1]
    told = [each.logprobs for each in pieces if each.logprobs is not None]
    return replace(
        first,
        text="".join(each.text for each in pieces),
        parts=tuple(join_parts([part for each in pieces for part in each.parts])),
        logprobs=tuple(chain.from_iterable(told)) if told else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


class Usage:
    """Adds up the tokens of an answer from its events."""

    def __init__(self, prepared: Sequence[PreparedJob]) -> None:
        self.num_prompt_tokens = sum(len(each.prompt_token_ids) for each in prepared)
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0
        self._num_cached = [0] * len(prepared)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were shared instead of computed."""
        return sum(self._num_cached)

    def note(self, job: int, event: OutputEvent) -> None:
        """Take in the next event."""
        self.num_output_tokens += len(event.token_ids)
        if event.index == 0:
            self._num_cached[job] = max(self._num_cached[job], event.num_cached_tokens)

    def as_json(self) -> dict[str, Any]:
        """OpenAI's shape."""
        counts: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self.num_reasoning_tokens:
            details = {"reasoning_tokens": self.num_reasoning_tokens}
            counts["completion_tokens_details"] = details
        return counts


@dataclass(slots=True)
class _Choice:
    parser: AnswerParser | None = None
    num_chars: int = 0
    has_begun: bool = False
    pending: list[PositionLogprobs] = field(default_factory=list[PositionLogprobs])


class Pieces:
    """Turns events into pieces, and takes answers apart where that is wanted.

    Log probabilities of a token wait until its text has been shown, since a stop string may still
    swallow it. Where those of the prompt are wanted, all choices wait for them.

    Args:
        prepared: The jobs.
        usage: Told of tokens of reasoning.
        parser: Makes what takes an answer to a job apart.
    """

    def __init__(
        self,
        prepared: Sequence[PreparedJob],
        usage: Usage,
        parser: Callable[[PreparedJob], AnswerParser] | None = None,
    ) -> None:
        self._usage = usage
        self._n = prepared[0].params.n
        self._params = [each.params for each in prepared]
        self._choices = [
            _Choice(parser and parser(each)) for each in prepared for _ in range(self._n)
        ]
        self._prompts: list[tuple[PositionLogprobs | None, ...] | None] = [None] * len(prepared)
        self._held: list[tuple[int, OutputEvent]] = []

    def take(self, job: int, event: OutputEvent) -> list[Piece]:
        """The pieces that an event lets out; each choice gets at least one in all."""
        if event.prompt_logprobs is not None:
            self._prompts[job] = event.prompt_logprobs
        # The first output tells of the prompt, with its first token or else at its end.
        is_told = event.index == 0 and event.finish_reason is not None
        if self._params[job].prompt_logprobs is not None and self._prompts[job] is None:
            if not is_told:
                self._held.append((job, event))
                return []
            self._prompts[job] = ()
        held = [each for each in self._held if each[0] == job]
        self._held = [each for each in self._held if each[0] != job]
        return [self._piece(*each) for each in (*held, (job, event))]

    def _piece(self, job: int, event: OutputEvent) -> Piece:
        index = job * self._n + event.index
        choice = self._choices[index]
        is_first, choice.has_begun = not choice.has_begun, True
        choice.num_chars += len(event.text)
        shown = None
        if event.logprobs is not None:
            choice.pending += event.logprobs
            is_whole = event.finish_reason is not None
            shown = shown_logprobs(choice.pending, choice.num_chars, is_whole=is_whole)
            choice.pending = [
                each for each in choice.pending if max(each.start + 1, each.end) > choice.num_chars
            ]
        piece = Piece(
            job=job,
            index=index,
            is_first=is_first,
            text=event.text,
            logprobs=shown,
            finish_reason=event.finish_reason,
            stop_reason=event.stop_reason,
            prompt_logprobs=self._prompts[job] if is_first else None,
        )
        return self._with_parts(piece, choice.parser, event)

    def _with_parts(self, piece: Piece, parser: AnswerParser | None, event: OutputEvent) -> Piece:
        if parser is None:
            return replace(piece, parts=(TextPart(piece.text),) if piece.text else ())
        parts = parser.add(piece.text)
        if parser.is_reasoning:
            self._usage.num_reasoning_tokens += len(event.token_ids)
        if event.finish_reason is None:
            return replace(piece, parts=tuple(parts))
        parts += parser.finish()
        calls = event.finish_reason == "stop" and parser.has_tool_calls
        reason = "tool_calls" if calls else event.finish_reason
        return replace(piece, parts=tuple(parts), finish_reason=reason)
