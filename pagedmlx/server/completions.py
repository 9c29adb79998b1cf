"""``/v1/completions``: prompts as text or token ids in, what follows them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from starlette.requests import Request
from starlette.responses import Response

from pagedmlx.engine.inputs import PreparedJob
from pagedmlx.engine.outputs import Job, PositionLogprobs
from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.answer import Ask, answer
from pagedmlx.server.choices import choice_format
from pagedmlx.server.fields import (
    COMPLETION_FIELDS,
    include_usage,
    refuse_with_stream,
    sampling_params,
    sort_fields,
    typed,
)
from pagedmlx.server.logprobs import completion_logprobs, prompt_logprobs
from pagedmlx.server.service import Service
from pagedmlx.server.structured import read_structured
from pagedmlx.server.writer import Piece
from pagedmlx.text.tokenizer import Tokenizer

MAX_PROMPTS = 128
"""Most prompts in one request."""

MAX_CHOICES = 1024
"""Most answers to one request, over all its prompts."""

_MAX_TOKENS = 16  # OpenAI's default


async def completions(request: Request) -> Response:
    """Go on from one prompt or from several."""
    return await answer(request, _read)


def _read(body: dict[str, Any], service: Service) -> Ask:
    values, unknown = sort_fields(body, COMPLETION_FIELDS, strict=service.settings.strict)
    model = service.check_model(typed(values, "model", str, None))
    engine = service.require_engine()
    stream = typed(values, "stream", bool, False)
    refuse_with_stream(values, stream=stream)
    echo = typed(values, "echo", bool, False)
    if echo and "prompt_logprobs" in values:
        raise InvalidRequestError("prompt_logprobs", "echo with logprobs tells the same")
    prompts = read_prompts(values.get("prompt"))
    structured, places = read_structured(values)
    params = sampling_params(
        values,
        COMPLETION_FIELDS,
        {"max_tokens": _MAX_TOKENS, **engine.sampling_defaults},
        structured=structured,
        # With echo, what is told of the answer's tokens is told of the prompt's too.
        **({"prompt_logprobs": values.get("logprobs")} if echo else {}),
    )
    if len(prompts) * params.n > MAX_CHOICES:
        raise InvalidRequestError(
            "n", f"{len(prompts)} prompts with {params.n} answers each, at most {MAX_CHOICES}"
        )
    jobs = tuple(
        Job(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            sampling_params=params,
            priority=typed(values, "priority", int, 0),
            cache_salt=typed(values, "cache_salt", str, ""),
        )
        for prompt in prompts
    )

    def writer(prepared: Sequence[PreparedJob]) -> CompletionWriter:
        echoes = [Echo.of(each, engine.tokenizer) for each in prepared] if echo else []
        return CompletionWriter(
            echoes=tuple(echoes),
            tells_prompts="prompt_logprobs" in values,
        )

    return Ask(
        id_prefix="cmpl-",
        jobs=jobs,
        model=model,
        format=choice_format(writer, include_usage=include_usage(values, stream=stream)),
        stream=stream,
        unknown=unknown,
        renamed={"prompt_token_ids": "prompt", **places},
    )


def read_prompts(
    value: object, name: str = "prompt", most: int = MAX_PROMPTS
) -> list[str | list[int]]:
    """The prompts of a request: a string, a list of them, token ids, or lists of those.

    Args:
        value: What the request has.
        name: Its field.
        most: How many there may be.

    Raises:
        InvalidRequestError: It is none of that, or too many.
    """
    if value is None:
        raise InvalidRequestError(name, "is missing")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(name, "must be text, token ids or a list of them, not empty")
    items = cast("list[Any]", value)
    if all(_is_id(each) for each in items):
        return [items]
    if not all(isinstance(each, str) for each in items) and not all(
        isinstance(each, list) and all(map(_is_id, cast("list[Any]", each))) for each in items
    ):
        raise InvalidRequestError(name, "mixes text, token ids or something else")
    if len(items) > most:
        raise InvalidRequestError(name, f"{len(items)} prompts, at most {most}")
    return items


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answers begin with.

    Attributes:
        text: As it was sent; token ids as they decode.
        first_token: Text of the first token, of which no probability can be told.
        lead: Characters that the decode has in front of ``text``: a begin-of-sequence token.
    """

    text: str = ""
    first_token: str = ""
    lead: int = 0

    @classmethod
    def of(cls, prepared: PreparedJob, tokenizer: Tokenizer) -> Echo:
        """The echo of a prepared prompt."""
        ids = prepared.prompt_token_ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        text = decoded if prepared.job.prompt is None else prepared.job.prompt
        lead = len(decoded) - len(text) if decoded.endswith(text) else 0
        return cls(text, tokenizer.decode(ids[:1], skip_special_tokens=False), lead)

    def positions(
        self, told: Sequence[PositionLogprobs | None]
    ) -> Iterator[tuple[PositionLogprobs | str, int]]:
        """What is told of the prompt's tokens, each with its place in the text."""
        for each in told:
            if each is None:
                yield self.first_token, 0
            else:
                yield each, max(0, each.start - self.lead)


@dataclass(frozen=True, slots=True)
class CompletionWriter:
    """Writes answers as text completions.

    Attributes:
        echoes: One for each prompt if answers begin with it, else none.
        tells_prompts: Whether ``prompt_logprobs`` was asked for by that name.
    """

    echoes: tuple[Echo, ...] = ()
    tells_prompts: bool = False
    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    def choice(self, piece: Piece) -> dict[str, Any]:
        """One choice of a whole answer."""
        choice = self._choice(piece)
        if self.tells_prompts:
            choice["prompt_logprobs"] = prompt_logprobs(piece.prompt_logprobs)
        return choice

    def extras(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Nothing: all is in the choices."""
        return {}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The echo with the first text; nothing for a token that shows no text yet."""
        choice = self._choice(piece)
        has_news = choice["text"] or choice["logprobs"] or piece.finish_reason is not None
        return [choice] if has_news else []

    def _choice(self, piece: Piece) -> dict[str, Any]:
        echo = self.echoes[piece.job] if self.echoes else Echo()
        told: list[tuple[PositionLogprobs | str, int]] = []
        if self.echoes and piece.is_first and piece.logprobs is not None:
            told += echo.positions(piece.prompt_logprobs or ())
        start = len(echo.text)
        told += [(each, start + each.start) for each in piece.logprobs or ()]
        return {
            "index": piece.index,
            "text": echo.text + piece.text if piece.is_first else piece.text,
            "logprobs": completion_logprobs(told) if told else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
