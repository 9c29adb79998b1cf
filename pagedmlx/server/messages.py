"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagedmlx.engine.inputs import PreparedJob
from pagedmlx.engine.outputs import Job
from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.agent_fields import MESSAGE_FIELDS
from pagedmlx.server.answer import Ask, answer
from pagedmlx.server.anthropic_format import MessageFormat
from pagedmlx.server.anthropic_input import to_messages
from pagedmlx.server.body import read_json
from pagedmlx.server.errors import JsonResponse
from pagedmlx.server.fields import sampling_params, sort_fields, typed
from pagedmlx.server.format import Head
from pagedmlx.server.service import Service

_RENAMED = {"prompt": "messages", "stop": "stop_sequences"}


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
    job = _job(values, service)
    encode = partial(engine.tokenizer.apply_chat_template, job.messages, **job.chat_template_kwargs)
    return JsonResponse({"input_tokens": len(await asyncio.to_thread(encode))})


def _read(body: dict[str, Any], service: Service) -> Ask:
    values, unknown = sort_fields(body, MESSAGE_FIELDS, strict=service.settings.strict)
    model = service.check_model(typed(values, "model", str, None))
    if "max_tokens" not in values:
        raise InvalidRequestError("max_tokens", "is missing")
    job = _job(values, service)

    def format(head: Head, _prepared: Sequence[PreparedJob]) -> MessageFormat:
        return MessageFormat(head, job.sampling_params.stop)

    return Ask(
        id_prefix="msg_",
        jobs=(job,),
        model=model,
        format=format,
        stream=typed(values, "stream", bool, False),
        unknown=unknown,
        renamed=_RENAMED,
    )


def _job(values: Mapping[str, Any], service: Service) -> Job:
    params = sampling_params(
        values, MESSAGE_FIELDS, service.require_engine().sampling_defaults, _RENAMED
    )
    return Job(
        messages=to_messages(values.get("system"), values.get("messages")),
        sampling_params=params,
        priority=typed(values, "priority", int, 0),
        cache_salt=typed(values, "cache_salt", str, ""),
        chat_template_kwargs=typed(values, "chat_template_kwargs", dict, {}),
    )
