"""Answers end, whatever the client does, and what was said stays."""

from __future__ import annotations

import asyncio

import pytest

from pagedmlx.chat.answers import Progress, write_answers
from pagedmlx.chat.client import ChatClient
from pagedmlx.chat.session import ASSISTANT, USER, Conversation, Message
from tests.support.chat import FakeClient, failed


def ask(client: FakeClient, n: int = 1, *, stop: bool = False) -> tuple[list[Message], Progress]:
    """Ask one question; with ``stop`` it is cancelled after the first piece."""
    conversation, progress = Conversation(), Progress()
    conversation.add(USER, "Why?")
    ids = [conversation.add(ASSISTANT, parent_id=1).message_id for _ in range(n)]

    async def ready() -> ChatClient:
        return client

    async def run() -> None:
        if stop:
            client.gate = asyncio.Semaphore(1)
        task = asyncio.create_task(write_answers(ready, conversation, ids, "r", progress))
        if stop:
            while not conversation.messages[ids[0]].text:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.wait([task])

    asyncio.run(run())
    return [conversation.messages[each] for each in ids], progress


def test_an_answer_grows_and_is_done() -> None:
    client = FakeClient()
    (answer,), progress = ask(client)
    assert (answer.text, answer.status, answer.num_tokens) == ("Hello there.", "done", 2)
    assert progress.num_tokens == 9
    assert (progress.num_cached_tokens, progress.ttft_s) == (3, 0.25)
    assert progress.dirty == {answer.message_id}
    assert client.requests[0].messages == [{"role": "user", "content": "Why?"}]


def test_candidates_are_one_request() -> None:
    client = FakeClient()
    answers, _ = ask(client, 3)
    assert [each.text for each in answers] == [f"Hello [{i}]there.[{i}]" for i in range(3)]
    assert [request.params.n for request in client.requests] == [3]


def test_a_failed_answer_keeps_what_was_said_and_says_why() -> None:
    client = FakeClient()
    client.error = failed("the pool is gone", "restart")
    (answer,), _ = ask(client)
    assert (answer.text, answer.status) == ("Hello there.", "failed")
    assert answer.error == "the pool is gone (restart)"


def test_an_error_of_any_other_kind_is_told_too() -> None:
    client = FakeClient()
    client.error = ZeroDivisionError("division by zero")
    (answer,), _ = ask(client)
    assert answer.error == "unexpected ZeroDivisionError: division by zero"


def test_a_cancelled_answer_is_stopped_and_its_request_ended() -> None:
    client = FakeClient()
    (answer,), _ = ask(client, stop=True)
    assert (answer.text, answer.status, answer.error) == ("Hello ", "stopped", "")
    assert client.num_aborted == 1
