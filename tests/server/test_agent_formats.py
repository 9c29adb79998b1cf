"""Answers of a form that was asked for, and calls that must come, over the agents' own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest

from pagedmlx.config import EngineConfig
from pagedmlx.engine.load import load_engine
from tests.support.server import RunningServer, serving
from tests.support.tiny_models import save_tiny_folder

ASK: Any = [{"role": "user", "content": "Hi"}]


class Weather(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    rains: bool


SCHEMA = Weather.model_json_schema()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")
    config = EngineConfig(str(folder), num_blocks=512, max_model_len=2048, check_integrity=True)
    with serving(partial(load_engine, config)) as server:
        yield server
        server.assert_idle()


@pytest.fixture
def openai_client(tiny: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(tiny: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0) as client:
        yield client


def test_responses_parse_gives_an_object_of_the_class(openai_client: openai.OpenAI):
    parsed = openai_client.responses.parse(model="tiny", input="Hi", text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    with openai_client.responses.stream(model="tiny", input="Hi", text_format=Weather) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Weather)


def test_responses_can_be_made_to_call(openai_client: openai.OpenAI):
    tool: Any = {"type": "function", "name": "tell", "parameters": SCHEMA, "strict": True}
    for choice in ("required", {"type": "function", "name": "tell"}):
        response: Any = openai_client.responses.create(
            model="tiny",
            input="Hi",
            tools=[tool],
            tool_choice=choice,
            parallel_tool_calls=False,
        )
        (call,) = response.output
        assert call.name == "tell"
        Weather.model_validate_json(call.arguments)


def test_messages_follow_a_schema(anthropic_client: anthropic.Anthropic):
    for field in ("output_config", "output_format"):
        format: Any = {"type": "json_schema", "schema": SCHEMA}
        body = {field: {"format": format} if field == "output_config" else format}
        message = anthropic_client.messages.create(
            model="tiny", max_tokens=200, messages=ASK, extra_body=body
        )
        (block,) = message.content
        assert isinstance(block, anthropic.types.TextBlock)
        Weather.model_validate_json(block.text)


def test_messages_can_be_made_to_call(anthropic_client: anthropic.Anthropic):
    tool: Any = {"name": "tell", "input_schema": SCHEMA}
    for choice in ({"type": "any"}, {"type": "tool", "name": "tell"}):
        given: Any = {**choice, "disable_parallel_tool_use": True}
        with anthropic_client.messages.stream(
            model="tiny", max_tokens=300, messages=ASK, tools=[tool], tool_choice=given
        ) as stream:
            message = stream.get_final_message()
        assert message.stop_reason == "tool_use"
        (block,) = message.content
        assert block.type == "tool_use"
        Weather.model_validate(block.input)


def test_a_schema_that_nothing_fits_is_told_by_its_place(tiny: RunningServer):
    format = {"type": "json_schema", "schema": {"type": "integer", "minimum": 5, "maximum": 1}}
    answer = tiny.post("/v1/responses", {"input": "Hi", "text": {"format": format}})
    assert answer.status == 400
    assert answer.error["param"] == "text.format.schema"
    body = {"messages": ASK, "max_tokens": 9, "output_config": {"format": format}}
    answer = tiny.post("/v1/messages", body)
    assert answer.status == 400
    assert "output_config.format.schema" in answer.error["message"]


def test_a_choice_holds_for_both(tiny: RunningServer):
    asked = {"structured_outputs": {"choice": ["yes", "no"]}}
    response = tiny.post("/v1/responses", {"input": "Hi", **asked}).json
    assert response["output"][0]["content"][0]["text"] in ("yes", "no")
    message = tiny.post("/v1/messages", {"messages": ASK, "max_tokens": 9, **asked}).json
    assert message["content"][0]["text"] in ("yes", "no")
    assert json.dumps(message)
