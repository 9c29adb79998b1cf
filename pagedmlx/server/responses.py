"""``/v1/responses``: items in, items out; answers can be kept and gone on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagedmlx.engine.inputs import PreparedJob
from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.agent_fields import RESPONSE_FIELDS
from pagedmlx.server.agent_turn import read_turn
from pagedmlx.server.answer import Ask, answer
from pagedmlx.server.errors import JsonResponse
from pagedmlx.server.fields import sampling_params, sort_fields, typed
from pagedmlx.server.format import Head
from pagedmlx.server.responses_format import ResponseFormat
from pagedmlx.server.responses_input import read_items, to_messages
from pagedmlx.server.responses_store import StoredResponse
from pagedmlx.server.responses_tools import read_tool_choice, read_tools
from pagedmlx.server.service import Service
from pagedmlx.server.structured import read_format

_SEALED = "reasoning.encrypted_content"
_OF_HOSTED_TOOLS = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_RENAMED = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


async def create_response(request: Request) -> Response:
    """Answer a conversation."""
    return await answer(request, partial(_read, owner=_owner(request)))


async def get_response(request: Request) -> Response:
    """A stored answer.

    Raises:
        HttpError: There is none.
    """
    return JsonResponse(_stored(request).response)


async def delete_response(request: Request) -> Response:
    """Forget a stored answer.

    Raises:
        HttpError: There is none.
    """
    service: Service = request.app.state.service
    response_id = request.path_params["response_id"]
    service.responses.delete(_owner(request), response_id)
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    """The items of a stored answer's request, the last one first, all of them at once.

    Raises:
        HttpError: There is none.
    """
    stored = _stored(request)
    items = [
        {"id": f"item_{index}", **_in_parts(item)}
        for index, item in enumerate([*stored.history, *stored.items])
    ]
    if request.query_params.get("order") != "asc":
        items.reverse()
    return JsonResponse(
        {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"],
            "last_id": items[-1]["id"],
            "has_more": False,
        }
    )


def _in_parts(item: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(item.get("content"), str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return {**item, "content": [{"type": kind, "text": item["content"]}]}


def _stored(request: Request) -> StoredResponse:
    service: Service = request.app.state.service
    return service.responses.get(_owner(request), request.path_params["response_id"])


def _owner(request: Request) -> str:
    return request.state.owner


def _read(body: dict[str, Any], service: Service, *, owner: str) -> Ask:
    values, unknown = sort_fields(body, RESPONSE_FIELDS, strict=service.settings.strict)
    model = service.check_model(typed(values, "model", str, None))
    items = read_items(values.get("input"), partial(service.responses.item, owner))
    previous_id = typed(values, "previous_response_id", str, None)
    history: list[Any] = []
    if previous_id is not None:
        previous = service.responses.get(owner, previous_id, "previous_response_id")
        history = previous.conversation
    instructions = typed(values, "instructions", str, None)
    tools = read_tools(values.get("tools"), strict=service.settings.strict)
    engine = service.require_engine()
    structured, places = read_format(
        _text(values).get("format"), "text.format", values.get("structured_outputs")
    )
    renamed = {**_RENAMED, **({"grammar": "tools"} if tools.functions else {}), **places}
    params = sampling_params(
        values,
        RESPONSE_FIELDS,
        {"max_tokens": None, **engine.sampling_defaults},
        renamed,
        structured=structured,
    )
    effort, summary = _reasoning(values)
    several = typed(values, "parallel_tool_calls", bool, True)
    turn, job = read_turn(
        values,
        engine,
        to_messages(instructions, history, items),
        params,
        renamed,
        tools=tools.functions,
        tool_choice=read_tool_choice(values.get("tool_choice")),
        parallel_tool_calls=several,
        reasoning_effort=effort,
    )
    stores = typed(values, "store", bool, True)
    seals = _includes_sealed(values)
    echo = {
        "instructions": instructions,
        "max_output_tokens": params.max_tokens,
        "max_tool_calls": None,
        "metadata": typed(values, "metadata", dict, {}),
        "parallel_tool_calls": several,
        "previous_response_id": previous_id,
        "reasoning": {"effort": effort, "summary": summary},
        "service_tier": "default",
        "store": stores,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}} | _text(values),
        "tool_choice": values.get("tool_choice", "auto"),
        "tools": values.get("tools", []),
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.get("user"),
    }

    def keep(response: dict[str, Any]) -> None:
        if stores:
            service.responses.add(owner, StoredResponse(response, history, items))

    def format(head: Head, _prepared: Sequence[PreparedJob]) -> ResponseFormat:
        return ResponseFormat(head, echo, keep, tools, seals_reasoning=seals)

    return Ask(
        id_prefix="resp_",
        jobs=(job,),
        model=model,
        format=format,
        stream=typed(values, "stream", bool, False),
        unknown=(*unknown, *(f"tools.{kind}" for kind in tools.left_out)),
        renamed=renamed,
        parser=partial(turn.parser, engine),
    )


def _includes_sealed(values: Mapping[str, Any]) -> bool:
    names: list[Any] = typed(values, "include", list, [])
    for name in names:
        if name != _SEALED and name not in _OF_HOSTED_TOOLS:
            raise InvalidRequestError(
                "include", f"{str(name)[:80]!r} is not supported", hint=f"what is: {_SEALED}"
            )
    return _SEALED in names


def _reasoning(values: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The effort, and the kind of summary that is asked for; the reasoning itself will come."""
    given: dict[str, Any] = typed(values, "reasoning", dict, {})
    return typed(given, "effort", str, None), typed(given, "summary", str, None)


def _text(values: Mapping[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = typed(values, "text", dict, {})
    if text.get("verbosity") not in (None, "medium"):
        raise InvalidRequestError(
            "text.verbosity", "is not supported", hint="say it in the instructions"
        )
    return text
