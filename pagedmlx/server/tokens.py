"""``/tokenize`` and ``/detokenize``: text to token ids and back, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.body import read_json
from pagedmlx.server.errors import JsonResponse
from pagedmlx.server.fields import typed
from pagedmlx.server.service import Service


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of a conversation."""
    service: Service = request.app.state.service
    engine = service.require_engine()
    body = await read_json(request, service.settings)
    service.check_model(typed(body, "model", str, None))
    tokenizer = engine.tokenizer
    if (body.get("messages") is None) == (body.get("prompt") is None):
        raise InvalidRequestError("prompt", "exactly one of prompt and messages is needed")
    if body.get("messages") is not None:
        variables: dict[str, Any] = typed(body, "chat_template_kwargs", dict, {})
        opens = typed(body, "add_generation_prompt", bool, True)
        encode = partial(
            tokenizer.apply_chat_template,
            body["messages"],
            **{"add_generation_prompt": opens, **variables},
        )
    else:
        adds = typed(body, "add_special_tokens", bool, True)
        text = typed(body, "prompt", str, "")
        encode = partial(tokenizer.encode, text, add_special_tokens=adds)
    ids = await asyncio.to_thread(encode)
    strings = None
    if typed(body, "return_token_strs", bool, False):
        strings = [tokenizer.decode([each], skip_special_tokens=False) for each in ids]
    return JsonResponse(
        {
            "count": len(ids),
            "max_model_len": engine.limits.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
    )


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    service: Service = request.app.state.service
    engine = service.require_engine()
    body = await read_json(request, service.settings)
    service.check_model(typed(body, "model", str, None))
    ids: list[Any] = typed(body, "tokens", list, None) or []
    if not isinstance(body.get("tokens"), list):
        raise InvalidRequestError("tokens", "is missing; a list of token ids is needed")
    limit = max(engine.tokenizer.vocab_size, engine.limits.vocab_size)
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < limit:
            raise InvalidRequestError("tokens", f"{each!r} is not a token id below {limit}")
    text = await asyncio.to_thread(engine.tokenizer.decode, ids, skip_special_tokens=False)
    return JsonResponse({"prompt": text})
