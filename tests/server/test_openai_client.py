"""OpenAI's own client against a model: sync, async, streams, candidates, seeds, stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest

from pagedmlx.config import EngineConfig
from pagedmlx.engine.load import load_engine
from tests.support.server import RunningServer, serving
from tests.support.tiny_models import save_tiny_folder

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")
    config = EngineConfig(str(folder), num_blocks=128, max_model_len=256, check_integrity=True)
    with serving(partial(load_engine, config), api_keys=("key",)) as server:
        yield server
        server.assert_idle()


@pytest.fixture
def client(tiny: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="key", max_retries=0) as client:
        yield client


def test_whole_and_streamed_chats_are_the_same(client: openai.OpenAI):
    ask = partial(
        client.chat.completions.create, model="tiny", messages=MESSAGES, max_tokens=24, seed=5, n=2
    )
    whole = ask()
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 48
    texts = ["", ""]
    usage = None
    for chunk in ask(stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


def test_the_clients_own_stream_helper_understands_the_events(client: openai.OpenAI):
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, max_tokens=10, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.current_completion_snapshot
    assert "content.done" in kinds
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=10, temperature=0
    )
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_log_probabilities_are_understood(client: openai.OpenAI):
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=3, temperature=0
    )
    told = chat.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    for token in told.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob
    text = client.completions.create(
        model="tiny", prompt="ab", max_tokens=3, logprobs=2, echo=True, temperature=0
    ).choices[0]
    assert text.logprobs is not None
    assert text.logprobs.tokens is not None
    assert text.text.startswith("ab")
    assert text.logprobs.token_logprobs is not None
    assert text.logprobs.token_logprobs[0] is None


def test_seeds_repeat_and_stops_stop(client: openai.OpenAI):
    ask = partial(client.completions.create, model="tiny", prompt="once", max_tokens=40, seed=9)
    first = ask().choices[0]
    assert ask().choices[0].text == first.text
    assert ask(seed=10).choices[0].text != first.text
    stop = next(c for c in first.text[5:] if c != "\ufffd")
    ended = ask(stop=stop).choices[0]
    assert ended.text == first.text[: first.text.index(stop)]
    assert ended.finish_reason == "stop"


def test_many_at_once_answer_as_each_alone(tiny: RunningServer):
    prompts = [f"{'x' * (5 * i)} {i}" for i in range(12)]

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{tiny.url}/v1", api_key="key", max_retries=0
        ) as client:
            ask = partial(client.completions.create, model="tiny", max_tokens=16, temperature=0)

            async def streamed(prompt: str) -> str:
                parts = [c.choices[0].text async for c in await ask(prompt=prompt, stream=True)]
                return "".join(parts)

            together = await asyncio.gather(*map(streamed, prompts))
            alone = [(await ask(prompt=prompt)).choices[0].text for prompt in prompts]
        return together, alone

    together, alone = asyncio.run(run())
    assert together == alone


def test_leaving_a_stream_of_the_client_frees_everything(
    tiny: RunningServer, client: openai.OpenAI
):
    stream = client.completions.create(
        model="tiny",
        prompt="go on",
        max_tokens=200,
        n=2,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    tiny.assert_idle()


def test_errors_have_the_clients_types(tiny: RunningServer, client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="x" * 300, stream=True)
    other = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="wrong", max_retries=0)
    with other, pytest.raises(openai.AuthenticationError):
        other.models.list()
    assert [model.id for model in client.models.list()] == ["owner/tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
