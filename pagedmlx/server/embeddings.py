"""``/v1/embeddings``: texts or token ids in, a vector for each out."""

from __future__ import annotations

import base64
import json
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from pagedmlx.engine.async_engine import AsyncEngine
from pagedmlx.engine.inputs import PreparedJob
from pagedmlx.engine.outputs import EmbeddingParams, Job
from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.answer import ignored_fields
from pagedmlx.server.body import read_json
from pagedmlx.server.completions import read_prompts
from pagedmlx.server.errors import HttpError, to_json
from pagedmlx.server.field import no_effect, refused, used
from pagedmlx.server.fields import renamed_error, sort_fields, typed
from pagedmlx.server.generation import Generation
from pagedmlx.server.service import Service, logger
from pagedmlx.server.writer import Usage

if TYPE_CHECKING:
    from pagedmlx.engine.embedding import Vector

MAX_INPUTS = 2048
"""Most texts in one request."""

MAX_IN_FLIGHT = 64
"""So many of them are in the engine at once, so that others need not wait for all."""

EMBEDDING_FIELDS = (
    used("input", "A string, a list of strings, token ids, or a list of lists; up to 2048."),
    used("model", "A name of the served model; it may be left out."),
    used("encoding_format", "float or base64, of little-endian float32; float."),
    used("dimensions", "Only so many, normalized anew, where config.json has is_matryoshka."),
    used("priority", "Larger is served first; 0."),
    used("cache_salt", "Cached prompt beginnings are shared only under the same salt."),
    no_effect("user", "Who asks."),
    no_effect("metadata", "Notes of the client."),
    no_effect("safety_identifier", "Who asks."),
    no_effect("request_id", "The answer has an id of its own; the header X-Request-Id is kept."),
    refused("messages", "Conversations."),
    refused("truncate_prompt_tokens", "Cutting the prompt."),
    refused("add_special_tokens", "Prompts without them: send token ids.", True),
    refused("normalize", "The model's files decide."),
    refused("embed_dtype", "Other types than float32.", "float32"),
    refused("stream", "Streams.", False),
)


@dataclass(frozen=True, slots=True)
class _Ask:
    """A request as it was understood.

    Attributes:
        model: The name that the answer carries.
        jobs: One for each text.
        names: What to call each text.
        as_base64: How vectors are written.
        unknown: Fields that nobody knows.
    """

    model: str
    jobs: tuple[Job, ...]
    names: tuple[str, ...]
    as_base64: bool
    unknown: tuple[str, ...]


async def embeddings(request: Request) -> Response:
    """Embed one text or many."""
    service: Service = request.app.state.service
    engine = service.require_engine()
    body = await read_json(request, service.settings)
    ask = _read(body, service)
    if service.settings.log_contents:
        logger.info("asked: %s", json.dumps(body))
    generation = service.begin(engine, request.receive)
    try:
        prepared = await _prepare(ask, engine)
        usage = Usage(prepared)
        request.state.note.update(id=prepared[0].request_id, usage=usage)
        data = await _embed(generation, prepared, usage, as_base64=ask.as_base64)
    finally:
        generation.close()
    counts = {"prompt_tokens": usage.num_prompt_tokens, "total_tokens": usage.num_prompt_tokens}
    head = to_json({"object": "list", "model": ask.model, "usage": counts})
    return Response(
        head[:-1] + b',"data":[' + b",".join(data) + b"]}",
        media_type="application/json",
        headers=ignored_fields(ask.unknown),
    )


def _read(body: dict[str, Any], service: Service) -> _Ask:
    values, unknown = sort_fields(body, EMBEDDING_FIELDS, strict=service.settings.strict)
    encoding = typed(values, "encoding_format", str, "float")
    if encoding not in ("float", "base64"):
        raise InvalidRequestError("encoding_format", f"{encoding[:80]!r} is not float or base64")
    model = service.check_model(typed(values, "model", str, None))
    texts = read_prompts(values.get("input"), "input", MAX_INPUTS)
    job = Job(
        embedding=EmbeddingParams(typed(values, "dimensions", int, None)),
        priority=typed(values, "priority", int, 0),
        cache_salt=typed(values, "cache_salt", str, ""),
    )
    names = ["input"] if len(texts) == 1 else [f"input[{index}]" for index in range(len(texts))]
    return _Ask(
        model=model,
        jobs=tuple(
            replace(job, prompt=text)
            if isinstance(text, str)
            else replace(job, prompt_token_ids=text)
            for text in texts
        ),
        names=tuple(names),
        as_base64=encoding == "base64",
        unknown=unknown,
    )


async def _prepare(ask: _Ask, engine: AsyncEngine) -> list[PreparedJob]:
    """Check and tokenize all texts, before anything is run."""
    prepared: list[PreparedJob] = []
    answer_id = f"embd-{uuid.uuid4().hex}"
    for number, (job, name) in enumerate(zip(ask.jobs, ask.names, strict=True)):
        try:
            named = replace(job, request_id=f"{answer_id}-{number}" if number else answer_id)
            prepared.append(await engine.prepare(named))
        except InvalidRequestError as error:
            raise renamed_error(error, {"prompt": name, "prompt_token_ids": name}) from error
    return prepared


async def _embed(
    generation: Generation, prepared: Sequence[PreparedJob], usage: Usage, *, as_base64: bool
) -> list[bytes]:
    """Run all, a part of them at a time; the answer's ``data`` in the texts' order."""
    # Each is written as it comes: all at once would stop everyone else for a while.
    data = [b""] * len(prepared)
    waiting = deque(prepared)
    num_open = 0
    while waiting or num_open:
        if waiting and num_open <= MAX_IN_FLIGHT // 2:
            count = min(len(waiting), MAX_IN_FLIGHT - num_open)
            await generation.submit([waiting.popleft() for _ in range(count)])
            num_open += count
        found = await generation.next()
        if found is None:
            continue
        number, event = found
        if event.embedding is None:
            raise HttpError(503, "the request was ended", code="server_stopping")
        num_open -= 1
        usage.note(number, event)
        data[number] = _entry(number, event.embedding, as_base64=as_base64)
    return data


def _entry(index: int, vector: Vector, *, as_base64: bool) -> bytes:
    value = vector.tolist()
    if as_base64:
        value = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return to_json({"object": "embedding", "index": index, "embedding": value})
