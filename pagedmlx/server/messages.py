"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagedmlx.engine.inputs import PreparedJob
from pagedmlx.engine.outputs import Job
from pagedmlx.engine.turn import Turn
from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.agent_fields import MESSAGE_FIELDS
from pagedmlx.server.agent_turn import read_turn
from pagedmlx.server.answer import Ask, answer
from pagedmlx.server.anthropic_format import MessageFormat
from pagedmlx.server.anthropic_input import to_messages
from pagedmlx.server.anthropic_tools import message_tool_choice, message_tools
from pagedmlx.server.body import read_json
from pagedmlx.server.errors import JsonResponse
from pagedmlx.server.fields import sampling_params, sort_fields, typed
from pagedmlx.server.format import Head
from pagedmlx.server.service import Service
from pagedmlx.server.structured import read_format
from pagedmlx.text.answer_style import AnswerStyle

_RENAMED = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
}


async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    return await answer(request, _read)


async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation is, without answering it."""
    service: Service = request.app.state.service
    engine = service.require_engine()
    body = await read_json(request, service.settings)
    values, _ = sort_fields(body, MESSAGE_FIELDS, strict=service.settings.strict)
    service.check_model(typed(values, "model", str, None))
    job = (await asyncio.to_thread(_read_turn, values, service)).job
    encode = partial(engine.tokenizer.apply_chat_template, job.messages, **job.chat_template_kwargs)
    return JsonResponse({"input_tokens": len(await asyncio.to_thread(encode))})


def _read(body: dict[str, Any], service: Service) -> Ask:
    values, unknown = sort_fields(body, MESSAGE_FIELDS, strict=service.settings.strict)
    model = service.check_model(typed(values, "model", str, None))
    if "max_tokens" not in values:
        raise InvalidRequestError("max_tokens", "is missing")
    asked = _read_turn(values, service)

    def format(head: Head, _prepared: Sequence[PreparedJob]) -> MessageFormat:
        return MessageFormat(head, asked.job.sampling_params.stop)

    return Ask(
        id_prefix="msg_",
        jobs=(asked.job,),
        model=model,
        format=format,
        stream=typed(values, "stream", bool, False),
        unknown=(*unknown, *(f"tools.{kind}" for kind in asked.left_out)),
        renamed=asked.renamed,
        parser=partial(asked.turn.parser, service.require_engine()),
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request asks for.

    Attributes:
        turn: Of the assistant.
        job: What the engine is to do.
        left_out: Types of tools that the model doesn't get.
        renamed: What the request calls fields that errors name.
    """

    turn: Turn
    job: Job
    left_out: Sequence[str]
    renamed: Mapping[str, str]


def _read_turn(values: Mapping[str, Any], service: Service) -> _Asked:
    engine = service.require_engine()
    wanted: dict[str, Any] = typed(values, "output_config", dict, {})
    format, where = wanted.get("format"), "output_config.format"
    if format is None:
        format, where = values.get("output_format"), "output_format"
    structured, places = read_format(format, where, values.get("structured_outputs"))
    tools, left_out = message_tools(values.get("tools"), strict=service.settings.strict)
    renamed = {**_RENAMED, **({"grammar": "tools"} if tools else {}), **places}
    params = sampling_params(
        values, MESSAGE_FIELDS, engine.sampling_defaults, renamed, structured=structured
    )
    choice, several = message_tool_choice(values.get("tool_choice"))
    turn, job = read_turn(
        values,
        engine,
        to_messages(values.get("system"), values.get("messages")),
        params,
        renamed,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=several,
        reasoning_effort=_effort(values.get("thinking"), wanted.get("effort"), engine.answer_style),
    )
    return _Asked(turn, job, left_out, renamed)


def _effort(thinking: object, effort: object, style: AnswerStyle) -> object:
    """The reasoning effort that comes nearest to what is asked for.

    Models that always reason do so too where thinking is disabled: agents disable it for small
    tasks without knowing the model.
    """
    kind = None
    if thinking is not None:
        kind = thinking.get("type") if isinstance(thinking, Mapping) else None
        if kind not in ("enabled", "adaptive", "disabled"):
            raise InvalidRequestError(
                "thinking", f"{repr(thinking)[:80]} is not a mode", hint="enabled or disabled"
            )
    if kind == "disabled":
        return "none" if style.switches & {"enable_thinking", "thinking"} else None
    if kind is not None:
        return effort or "medium"
    return effort if "reasoning_effort" in style.switches else None
