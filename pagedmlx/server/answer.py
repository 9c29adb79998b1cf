"""The way of a generating request: read it, run it, and answer whole or as a stream."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagedmlx.engine.inputs import PreparedJob
from pagedmlx.engine.outputs import Job
from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.body import read_json
from pagedmlx.server.errors import JsonResponse
from pagedmlx.server.fields import renamed_error
from pagedmlx.server.format import Format, Head
from pagedmlx.server.generation import Generation
from pagedmlx.server.service import Service, logger
from pagedmlx.server.streaming import EventStream
from pagedmlx.server.writer import Piece, Pieces, Usage, join_pieces
from pagedmlx.text.answer_parser import AnswerParser

_MAX_NAMED = 20


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as its endpoint has understood it.

    Attributes:
        id_prefix: The answer's id begins with it.
        jobs: One for each prompt.
        model: The name that the answer carries.
        format: Makes what shapes the answer, once the jobs have been prepared.
        stream: Whether it is sent as it grows.
        unknown: Fields that nobody knows.
        renamed: What the request calls fields that the engine's errors name.
        parser: Makes what takes an answer to a job apart; None leaves answers whole.
    """

    id_prefix: str
    jobs: tuple[Job, ...]
    model: str
    format: Callable[[Head, Sequence[PreparedJob]], Format]
    stream: bool
    unknown: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    parser: Callable[[PreparedJob], AnswerParser] | None = None


async def answer(request: Request, read: Callable[[dict[str, Any], Service], Ask]) -> Response:
    """Answer a request.

    Args:
        request: Its body has not been read.
        read: Understands the body of its endpoint, and raises what is wrong with it.

    Raises:
        PagedMLXError: It is refused or failed; nothing has been sent.
        ClientGoneError: Nobody waits for it any more.
    """
    service: Service = request.app.state.service
    engine = service.require_engine()
    body = await read_json(request, service.settings)
    ask = read(body, service)
    if service.settings.log_contents:
        logger.info("asked: %s", json.dumps(body))
    generation = service.begin(engine, request.receive)
    is_handed_over = False
    try:
        answer_id = f"{ask.id_prefix}{uuid.uuid4().hex}"
        await _start(generation, ask, answer_id)
        usage = Usage(generation.prepared)
        request.state.note.update(id=answer_id, usage=usage)
        format = ask.format(
            Head(answer_id, int(time.time()), ask.model, usage), generation.prepared
        )
        headers = ignored_fields(ask.unknown)
        pieces = Pieces(generation.prepared, usage, ask.parser)
        if ask.stream:
            stream = EventStream(
                generation, pieces, format, usage, settings=service.settings, headers=headers
            )
            is_handed_over = True
            return stream
        choices = await _whole(generation, pieces, usage)
        if service.settings.log_contents:
            logger.info("answered: %s", json.dumps({each.index: each.text for each in choices}))
        return JsonResponse(format.whole(choices), headers=headers)
    finally:
        if not is_handed_over:
            generation.close()


async def _start(generation: Generation, ask: Ask, answer_id: str) -> None:
    ids = [answer_id, *(f"{answer_id}-{number}" for number in range(1, len(ask.jobs)))]
    named = [replace(job, request_id=id) for job, id in zip(ask.jobs, ids, strict=True)]
    try:
        await generation.start(named)
    except InvalidRequestError as error:
        raise renamed_error(error, ask.renamed) from error


async def _whole(generation: Generation, pieces: Pieces, usage: Usage) -> list[Piece]:
    """Each choice in one piece."""
    choices: dict[int, list[Piece]] = {}
    while not generation.is_finished:
        found = await generation.next()
        if found is not None:
            usage.note(*found)
            for piece in pieces.take(*found):
                choices.setdefault(piece.index, []).append(piece)
    return [join_pieces(choices[index]) for index in sorted(choices)]


def ignored_fields(unknown: Sequence[str]) -> dict[str, str]:
    """A header that names what nobody knows, as far as a header can."""
    named = [name if _is_plain(name) else "?" for name in unknown[:_MAX_NAMED]]
    return {"X-Ignored-Fields": ", ".join(named)} if named else {}


def _is_plain(name: str) -> bool:
    return len(name) <= 64 and re.fullmatch(r"[\w.-]+", name, re.ASCII) is not None
