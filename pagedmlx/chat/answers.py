"""Writes a client's answers into a conversation; whatever happens, each of them ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from pagedmlx.chat.client import ChatClient, ChatRequest, Delta
from pagedmlx.chat.session import DONE, FAILED, LENGTH, STOPPED, STREAMING, Conversation
from pagedmlx.errors import PagedMLXError

_ENDS = {"length": LENGTH, "abort": STOPPED, "error": FAILED}


@dataclass(slots=True)
class Progress:
    """How far the answers of a conversation are.

    Attributes:
        dirty: Messages that have changed since somebody emptied this.
        num_prompt_tokens: Tokens of the last prompt; None while unknown.
        num_output_tokens: Tokens of the answer that changed last.
        num_cached_tokens: Tokens of the last prompt that needn't be computed.
        ttft_s: From the last request to its first token; None while unknown.
    """

    dirty: set[int] = field(default_factory=set[int])
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    ttft_s: float | None = None

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the context that are taken; None while unknown."""
        prompt = self.num_prompt_tokens
        return None if prompt is None else prompt + self.num_output_tokens


async def write_answers(
    ready_client: Callable[[], Awaitable[ChatClient]],
    conversation: Conversation,
    ids: Sequence[int],
    request_id: str,
    progress: Progress,
) -> None:
    """Stream one request's candidates into messages; errors become theirs.

    Args:
        ready_client: Waits until the model is there.
        conversation: Where the messages are.
        ids: A message for each candidate.
        request_id: Unique among those in flight.
        progress: Told what happens.

    Raises:
        CancelledError: It was cancelled; the answers are marked as stopped.
    """
    status, error = DONE, ""
    try:
        client = await ready_client()
        params = replace(conversation.params, n=len(ids))
        request = ChatRequest(request_id, conversation.prompt_for(ids[0]), params)
        async with contextlib.aclosing(client.answer(request)) as deltas:
            async for delta in deltas:
                _take(conversation, ids[delta.index], delta, progress)
    except asyncio.CancelledError:
        status = STOPPED
        raise
    except PagedMLXError as problem:
        status, error = FAILED, f"{problem} ({problem.hint})" if problem.hint else str(problem)
    except Exception as problem:
        status, error = FAILED, f"unexpected {type(problem).__name__}: {problem}"
    finally:
        for each in ids:
            if conversation.messages[each].status == STREAMING:
                conversation.change(each, status=status, error=error)
        progress.dirty.update(ids)


def _take(conversation: Conversation, message_id: int, delta: Delta, progress: Progress) -> None:
    message = conversation.messages[message_id]
    num_tokens = message.num_tokens if delta.num_output_tokens is None else delta.num_output_tokens
    status = message.status if delta.finish is None else _ENDS.get(delta.finish, DONE)
    conversation.change(
        message_id, text=message.text + delta.text, num_tokens=num_tokens, status=status
    )
    progress.dirty.add(message_id)
    progress.num_output_tokens = num_tokens
    if delta.num_prompt_tokens is not None:
        progress.num_prompt_tokens = delta.num_prompt_tokens
    if delta.num_cached_tokens is not None:
        progress.num_cached_tokens = delta.num_cached_tokens
    if delta.ttft_s is not None:
        progress.ttft_s = delta.ttft_s
