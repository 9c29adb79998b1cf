"""What responses and messages make of a request alike: a turn of the assistant, and its job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.engine.async_engine import AsyncEngine
from pagedmlx.engine.outputs import Job
from pagedmlx.engine.turn import Turn
from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.fields import renamed_error, typed


def read_turn(
    values: Mapping[str, Any],
    engine: AsyncEngine,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    renamed: Mapping[str, str],
    **asked: Any,
) -> tuple[Turn, Job]:
    """The turn, and what the engine is to do.

    Args:
        values: The request's fields, for those that all endpoints have.
        engine: The model.
        messages: The conversation in the chat API's form.
        params: How to sample.
        renamed: Names in the request by the names that errors have.
        asked: What else ``Turn.read`` takes: tools, their choice, reasoning.

    Raises:
        InvalidRequestError: Something of it is off; names the field as the request has it.
    """
    try:
        turn = Turn.read(
            engine,
            messages,
            chat_template_kwargs=typed(values, "chat_template_kwargs", dict, {}),
            **asked,
        )
        job = turn.job(
            engine,
            params,
            priority=typed(values, "priority", int, 0),
            cache_salt=typed(values, "cache_salt", str, ""),
        )
    except InvalidRequestError as error:
        raise renamed_error(error, renamed) from error
    return turn, job
