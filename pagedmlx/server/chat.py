"""``/v1/chat/completions``: a conversation in, messages of the assistant out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from pagedmlx.core.sampling_params import MAX_LOGPROBS
from pagedmlx.engine.turn import Turn
from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.answer import Ask, answer
from pagedmlx.server.choices import choice_format
from pagedmlx.server.fields import (
    CHAT_FIELDS,
    include_usage,
    refuse_with_stream,
    sampling_params,
    sort_fields,
    typed,
)
from pagedmlx.server.logprobs import chat_logprobs, prompt_logprobs
from pagedmlx.server.service import Service
from pagedmlx.server.structured import read_structured
from pagedmlx.server.writer import Piece
from pagedmlx.text.answer_parser import to_message
from pagedmlx.text.answer_parts import (
    AnswerPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
)


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    return await answer(request, _read)


def _read(body: dict[str, Any], service: Service) -> Ask:
    values, unknown = sort_fields(body, CHAT_FIELDS, strict=service.settings.strict)
    model = service.check_model(typed(values, "model", str, None))
    if "messages" not in values:
        raise InvalidRequestError("messages", "is missing; a list of messages is needed")
    stream = typed(values, "stream", bool, False)
    refuse_with_stream(values, stream=stream)
    max_tokens, name = _max_tokens(values)
    # Where the engine's errors say prompt, this endpoint's clients have written messages.
    structured, places = read_structured(values)
    renamed = {
        "prompt": "messages",
        "max_tokens": name,
        "logprobs": "top_logprobs",
        # With tools the whole answer becomes one grammar.
        **({"grammar": "tools"} if values.get("tools") else {}),
        **places,
    }
    engine = service.require_engine()
    turn = Turn.read(
        engine,
        values["messages"],
        tools=values.get("tools"),
        tool_choice=values.get("tool_choice"),
        parallel_tool_calls=typed(values, "parallel_tool_calls", bool, True),
        reasoning_effort=values.get("reasoning_effort"),
        chat_template_kwargs=typed(values, "chat_template_kwargs", dict, {}),
        splits_reasoning=typed(values, "separate_reasoning", bool, True),
    )
    params = sampling_params(
        values,
        CHAT_FIELDS,
        {"max_tokens": None, **engine.sampling_defaults},
        renamed,
        max_tokens=max_tokens,
        logprobs=_num_logprobs(values),
        structured=structured,
    )
    job = turn.job(
        engine,
        params,
        priority=typed(values, "priority", int, 0),
        cache_salt=typed(values, "cache_salt", str, ""),
    )
    writer = ChatWriter(shows_reasoning=typed(values, "include_reasoning", bool, True))
    return Ask(
        id_prefix="chatcmpl-",
        jobs=(job,),
        model=model,
        format=choice_format(
            lambda _prepared: writer, include_usage=include_usage(values, stream=stream)
        ),
        stream=stream,
        unknown=unknown,
        renamed=renamed,
        parser=partial(turn.parser, engine),
    )


def _max_tokens(values: dict[str, Any]) -> tuple[Any, str]:
    """The limit of the answer and the name that the request gives it."""
    new, old = values.get("max_completion_tokens"), values.get("max_tokens")
    if new is None:
        return old, "max_tokens"
    if old is not None and old != new:
        raise InvalidRequestError("max_tokens", f"{old!r} is not max_completion_tokens, {new!r}")
    return new, "max_completion_tokens"


def _num_logprobs(values: dict[str, Any]) -> Any:
    """How many likeliest tokens to tell of; None tells nothing at all."""
    top = values.get("top_logprobs")
    if typed(values, "logprobs", bool, False):
        return 0 if top is None else top
    if top is not None and top != 0:
        raise InvalidRequestError(
            "top_logprobs",
            f"{top!r} goes with logprobs: true",
            hint=f"0 to {MAX_LOGPROBS} of them",
        )
    return None


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """Writes answers as chat completions.

    Attributes:
        shows_reasoning: Whether reasoning is told, or left out.
    """

    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    shows_reasoning: bool = True

    def choice(self, piece: Piece) -> dict[str, Any]:
        """One choice of a whole answer."""
        said = to_message(piece.parts)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said.content or (None if said.tool_calls else ""),
            "refusal": None,
        }
        if said.reasoning and self.shows_reasoning:
            message |= _reasoning(said.reasoning)
        if said.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in said.tool_calls]
        return {
            "index": piece.index,
            "message": message,
            "logprobs": chat_logprobs(piece.logprobs),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def extras(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What is told of the prompt."""
        told = prompt_logprobs(pieces[0].prompt_logprobs)
        return {} if told is None else {"prompt_logprobs": told}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The role first, then what is said, then the end."""
        chunks: list[dict[str, Any]] = []
        if piece.is_first:
            chunks.append(_chunk(piece, {"role": "assistant", "content": "", "refusal": None}))
        deltas = [delta for part in piece.parts if (delta := self._delta(part))]
        if piece.logprobs and not deltas:
            deltas.append({"content": ""})
        said = [_chunk(piece, delta) for delta in deltas]
        if said:
            said[0]["logprobs"] = chat_logprobs(piece.logprobs)
        chunks += said
        if piece.finish_reason is not None:
            chunks.append(_chunk(piece, {}))
            chunks[-1]["finish_reason"] = piece.finish_reason
            chunks[-1]["stop_reason"] = piece.stop_reason
        return chunks

    def _delta(self, part: AnswerPart) -> dict[str, Any]:
        match part:
            case TextPart(text):
                return {"content": text}
            case ReasoningPart(text):
                return _reasoning(text) if self.shows_reasoning else {}
            case ToolCallBegin(index, call_id, name):
                call = {"index": index, "id": call_id, "type": "function"}
                return {"tool_calls": [call | {"function": {"name": name, "arguments": ""}}]}
            case ToolCallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case _:
                return {}


def _reasoning(text: str) -> dict[str, Any]:
    """Under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def _chunk(piece: Piece, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None}
