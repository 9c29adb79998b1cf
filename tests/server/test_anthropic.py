"""``/v1/messages`` over Anthropic's client: text, thinking, tools, errors, and what agents send."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest

from pagedmlx.core.step import Step
from tests.support.answers import ARGUMENTS, CALLS
from tests.support.engines import FakeRunner, make_engine, spelled
from tests.support.scripted import MODELS, playing
from tests.support.server import RunningServer, serving

PATH = "/v1/messages"
ASK: Any = [{"role": "user", "content": "How is the weather?"}]
TOOL: Any = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THOUGHT = "<think>\nHm.\n</think>\n\n"


@contextmanager
def client_of(
    text: str | Sequence[str], model: str = "hermes", **settings: Any
) -> Iterator[tuple[anthropic.Anthropic, RunningServer]]:
    with serving(playing(MODELS[model], text), **settings) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="one", max_retries=0) as client:
            yield client, server
        server.assert_idle()


@pytest.fixture(scope="module")
def hello() -> Iterator[RunningServer]:
    build = lambda: make_engine(FakeRunner(spelled("Hello")), num_blocks=512, max_model_len=1024)  # noqa: E731
    with serving(build) as server:
        yield server
        server.assert_idle()


def shape(message: Any) -> dict[str, Any]:
    """What is the same each time."""
    found = message.model_dump(exclude_none=True, exclude={"id", "usage"})
    for block in found["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return found


def ask_both(client: anthropic.Anthropic, **fields: Any) -> Any:
    """The message, which is the same whole and streamed."""
    given = {"model": "tiny", "max_tokens": 300, "messages": ASK, **fields}
    whole = client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    assert shape(streamed) == shape(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


def test_thinking_text_and_calls_are_blocks_in_their_order():
    with client_of(f"{THOUGHT}I look.\n\n{CALLS['json_tools']}") as (client, _):
        message = ask_both(client, tools=[TOOL])
        thought, said, call = message.content
        assert thought.thinking == "Hm."
        assert thought.signature
        assert said.text == "I look."
        assert (call.name, call.input) == ("get_weather", ARGUMENTS)
        assert message.stop_reason == "tool_use"


def test_the_asynchronous_client_gets_the_same():
    with client_of(f"{THOUGHT}{CALLS['json_tools']}") as (client, server):
        whole = ask_both(client, tools=[TOOL])

        async def ask() -> Any:
            async with (
                anthropic.AsyncAnthropic(
                    base_url=server.url, auth_token="one", api_key=None, max_retries=0
                ) as other,
                other.messages.stream(
                    model="tiny", max_tokens=300, messages=ASK, tools=[TOOL]
                ) as stream,
            ):
                return await stream.get_final_message()

        assert shape(asyncio.run(ask())) == shape(whole)


def test_what_an_answer_had_goes_back_and_is_found_in_the_cache():
    # As the template writes it, too.
    with client_of(f"<think>Hm.</think>I look.{CALLS['json_tools']}") as (client, _):
        first = client.messages.create(
            model="tiny", max_tokens=300, messages=ASK, tools=[TOOL], system="Be brief."
        )
        result = {
            "type": "tool_result",
            "tool_use_id": first.content[-1].id,  # type: ignore[union-attr]
            "content": [{"type": "text", "text": "Rain."}],
            "cache_control": {"type": "ephemeral"},
        }
        messages: Any = [
            {"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]},
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
        ]
        # The note differs each time, and is no part of the prompt.
        note = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0aaa9;"}
        second = client.messages.create(
            model="tiny",
            max_tokens=300,
            messages=messages,
            tools=[TOOL],
            system=[note, {"type": "text", "text": "Be brief."}],  # type: ignore[list-item]
        )
        usage = second.usage
        assert usage.cache_read_input_tokens is not None
        reached = first.usage.input_tokens + len("Hm.I look.")
        assert usage.cache_read_input_tokens >= reached
        counted = client.messages.count_tokens(
            model="tiny", messages=messages, tools=[TOOL], system="Be brief."
        )
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_the_clients_tool_runner_goes_on_without_a_thread():
    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """Tells the weather."""
        asked.append((city, days))
        return "Rain."

    asked: list[tuple[str, int]] = []
    with client_of(CALLS["json_tools"]) as (client, _):
        answers = client.beta.messages.tool_runner(
            model="tiny", max_tokens=300, messages=ASK, tools=[get_weather], max_iterations=2
        )
        assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use"]
    assert asked[0] == (ARGUMENTS["city"], ARGUMENTS["days"])


def test_why_an_answer_ended_is_told():
    with client_of("Hello there", "no tools") as (client, _):
        ended = ask_both(client)
        assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
        cut = ask_both(client, max_tokens=3)
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "Hel")
        stopped = ask_both(client, stop_sequences=["x", " the"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " the")
        assert stopped.content[0].text == "Hello"


def test_a_cut_call_is_told_as_far_as_it_came():
    with client_of(CALLS["json_tools"]) as (_, server):
        body = {"messages": ASK, "tools": [TOOL], "max_tokens": 60}
        message = server.post(PATH, body).json
        assert message["stop_reason"] == "max_tokens"
        events = server.post(PATH, {**body, "stream": True}).events
        deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
        arguments = "".join(delta["partial_json"] for delta in deltas)
        assert message["content"][0]["input"] == {"arguments": arguments}


def test_what_agents_send_beside_the_conversation_is_accepted(hello: RunningServer):
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "max_tokens": 20,
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "output_config": {"effort": "high"},
        "thinking": {"type": "enabled", "budget_tokens": 4096},
        "top_k": 5,
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        "betas": ["a"],
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    answer = hello.post(f"{PATH}?beta=true", body, headers)
    assert answer.status == 200
    assert answer.headers["x-ignored-fields"] == "tools.web_search_20250305"
    assert answer.json["content"] == [{"type": "text", "text": "Hello"}]


def test_thinking_is_switched_by_what_the_template_knows():
    with client_of("Hello") as (client, server):
        # The template of this model writes an empty thought for those who want none.
        counts = [
            server.post(f"{PATH}/count_tokens", {"messages": ASK, **fields}).json["input_tokens"]
            for fields in (
                {},
                {"thinking": {"type": "adaptive"}},
                {"thinking": {"type": "disabled"}},
            )
        ]
        assert counts[0] == counts[1] < counts[2]
        assert ask_both(client, thinking={"type": "disabled"}).content[0].text == "Hello"
    with client_of("Hello", "no tools") as (client, _):
        assert ask_both(client, thinking={"type": "disabled"}).content[0].text == "Hello"


def test_failed_calls_are_told_as_failed(hello: RunningServer):
    def count(**fields: Any) -> int:
        result = {"type": "tool_result", "tool_use_id": "t", **fields}
        call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        messages = [
            *ASK,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        answer = hello.post(f"{PATH}/count_tokens", {"messages": messages})
        assert answer.status == 200
        return answer.json["input_tokens"]

    plain = count(content="no")
    assert count(content="no", is_error=True) == plain + len("Error: ")
    assert count(content="Error: no", is_error=True) == plain + len("Error: ")
    assert count() == plain - len("no")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [*ASK, {"role": "assistant", "content": "{"}]}, "messages[1]"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "x"}, "temperature"),
        ({"stop_sequences": 5}, "stop_sequences"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305"}]}, "tools"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "banana"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
        ({"thinking": 5}, "thinking"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "banana"}}}, "output_config.format.type"),
    ],
)
def test_what_is_wrong_is_told_in_anthropics_shape(
    hello: RunningServer, fields: dict[str, Any], told: str
):
    for stream in (False, True):
        body = {"messages": ASK, "max_tokens": 9, "stream": stream, **fields}
        answer = hello.post(PATH, body)
        assert answer.status == 400
        assert answer.json["type"] == "error"
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["message"].startswith(told)


def test_errors_before_the_endpoint_have_the_shape_too():
    with client_of("Hello", "no tools", api_keys=("one",)) as (client, server):
        assert client.messages.create(model="tiny", max_tokens=9, messages=ASK).content
        with pytest.raises(anthropic.AuthenticationError) as refused:
            client.with_options(api_key="two").messages.create(
                model="tiny", max_tokens=9, messages=ASK
            )
        assert refused.value.type == "authentication_error"
        assert refused.value.request_id
        with pytest.raises(anthropic.NotFoundError, match="no 'claude'"):
            client.messages.create(model="claude", max_tokens=9, messages=ASK)
        key = {"x-api-key": "one"}
        assert server.get(PATH, key).json["error"]["type"] == "invalid_request_error"
        broken = server.post(PATH, b"{", key)
        assert broken.status == 400
        assert broken.json["type"] == "error"


def test_the_client_lists_the_model():
    with client_of("Hello", "no tools") as (client, _):
        (model,) = client.models.list()
        assert (model.id, model.type) == ("owner/tiny", "model")
        assert model.created_at.year >= 2025
        assert client.models.retrieve("tiny").id == "tiny"


def test_an_error_in_a_stream_is_an_event_of_its_own():
    has_begun = threading.Event()

    def fail(step: Step) -> None:
        if step.step_id > 12:
            has_begun.wait(60)
            raise RuntimeError("broken on purpose")

    with serving(lambda: make_engine(FakeRunner(spelled("a" * 400), before_step=fail))) as server:
        connection = server.connect()
        body = json.dumps({"messages": ASK, "max_tokens": 200, "stream": True})
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        # The headers alone may come before the stream's first event.
        beginning = response.readline() + response.readline()
        has_begun.set()
        text = beginning + response.read()
        lines = [line for line in text.splitlines() if line.startswith(b"data: ")]
        connection.close()
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        assert events[0]["type"] == "message_start"
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "api_error"
        assert not any(each["type"] == "message_stop" for each in events)


def test_pings_come_while_nothing_else_does():
    go_on = threading.Event()

    def wait(step: Step) -> None:
        if any(entry.sequence.num_output_tokens >= 3 for entry in step.scheduled):
            go_on.wait(60)

    runner = FakeRunner(spelled("Hello"), before_step=wait)
    with serving(lambda: make_engine(runner), keep_alive_s=0.02) as server:
        connection = server.connect()
        body = json.dumps({"messages": ASK, "max_tokens": 20, "stream": True})
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        seen = b""
        while b"event: ping" not in seen:
            seen += response.readline()
        assert seen.index(b"event: message_start") < seen.index(b"event: ping")
        go_on.set()
        assert b"event: message_stop" in response.read()
        connection.close()
        server.assert_idle()
