"""``/v1/responses`` over OpenAI's client: text, reasoning, tools, formats, and stored answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from tests.support.answers import ARGUMENTS, CALLS
from tests.support.engines import FakeRunner, make_engine, spelled
from tests.support.scripted import MODELS, playing
from tests.support.server import RunningServer, serving

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THOUGHT = "<think>\nHm.\n</think>\n\n"


@contextmanager
def client_of(
    text: str | Sequence[str], model: str = "hermes", **settings: Any
) -> Iterator[tuple[openai.OpenAI, RunningServer]]:
    with serving(playing(MODELS[model], text), **settings) as server:
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="one", max_retries=0) as client:
            yield client, server
        server.assert_idle()


@pytest.fixture(scope="module")
def hello() -> Iterator[RunningServer]:
    build = lambda: make_engine(FakeRunner(spelled("Hello")), num_blocks=256)  # noqa: E731
    with serving(build) as server:
        yield server
        server.assert_idle()


def shape(response: Any) -> list[dict[str, Any]]:
    """The items without what is new each time."""
    items = [item.model_dump(exclude_none=True) for item in response.output]
    return [
        {
            key: value
            for key, value in item.items()
            if key not in ("id", "call_id", "parsed_arguments")
        }
        for item in items
    ]


def ask_both(client: openai.OpenAI, **fields: Any) -> Any:
    """The answer, which is the same whole and streamed."""
    whole = client.responses.create(model="tiny", **fields)
    with client.responses.stream(model="tiny", **fields) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}"
    assert shape(last.response) == shape(whole)
    return whole


def test_thoughts_text_and_calls_are_items_in_their_order():
    with client_of(f"{THOUGHT}I look.\n\n{CALLS['json_tools']}") as (client, _):
        response = ask_both(client, input="How is it?", tools=[TOOL])
        thought, said, call = response.output
        assert thought.content[0].text == "Hm."
        assert said.content[0].text == response.output_text == "I look."
        assert (call.type, call.name, json.loads(call.arguments)) == (
            "function_call",
            "get_weather",
            ARGUMENTS,
        )
        assert response.status == "completed"
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        assert (
            response.usage.total_tokens
            == response.usage.input_tokens + response.usage.output_tokens
        )


def test_a_calls_arguments_are_streamed():
    with client_of(CALLS["json_tools"]) as (client, _):
        deltas: list[str] = []
        done = ""
        with client.responses.stream(model="tiny", input="x", tools=[TOOL]) as stream:
            for event in stream:
                if event.type == "response.function_call_arguments.delta":
                    deltas.append(event.delta)
                elif event.type == "response.function_call_arguments.done":
                    done = event.arguments
        assert len(deltas) > 1
        assert "".join(deltas) == done
        assert json.loads(done) == ARGUMENTS


def test_what_an_answer_had_goes_back_and_is_found_in_the_cache():
    # As the template writes it, too.
    with client_of(f"<think>Hm.</think>I look.{CALLS['json_tools']}") as (client, _):
        items: list[Any] = [{"role": "user", "content": "How is it?"}]
        first = client.responses.create(
            model="tiny",
            input=items,
            tools=[TOOL],
            store=False,
            include=["reasoning.encrypted_content"],
        )
        assert isinstance(first.output[0], openai.types.responses.ResponseReasoningItem)
        assert first.output[0].encrypted_content
        kept = [item.model_dump(exclude_none=True) for item in first.output]
        # As agents do that keep no plain reasoning.
        del kept[0]["content"]
        output = {
            "type": "function_call_output",
            "call_id": kept[-1]["call_id"],
            "output": [{"type": "input_text", "text": "Rain."}],
        }
        second = client.responses.create(
            model="tiny", input=[*items, *kept, output], tools=[TOOL], store=False
        )
        assert second.usage is not None
        assert first.usage is not None
        thought = len("<think>Hm.</think>I look.") - len("<think></think>") + 2
        reached = first.usage.input_tokens + thought
        assert second.usage.input_tokens_details.cached_tokens >= reached


def test_an_answer_can_be_gone_on_from_read_and_forgotten():
    with client_of("Hello", "no tools") as (client, server):
        first = client.responses.create(
            model="tiny", input="Hi", instructions="Be brief.", metadata={"a": "b"}
        )
        assert client.responses.retrieve(first.id) == first
        assert first.metadata == {"a": "b"}
        second = client.responses.create(model="tiny", input="More", previous_response_id=first.id)
        items = [
            item.to_dict() for item in client.responses.input_items.list(second.id, order="asc")
        ]
        roles = [item["role"] for item in items]
        assert roles == ["user", "assistant", "user"]
        again = client.responses.create(
            model="tiny",
            input=[
                {"role": "user", "content": "Hi"},
                {"type": "item_reference", "id": first.output[0].id},  # type: ignore[typeddict-item]
                {"role": "user", "content": "More"},
            ],
        )
        assert again.usage == second.usage or again.usage.input_tokens == second.usage.input_tokens  # type: ignore[union-attr]
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="response"):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError, match="previous_response_id"):
            client.responses.create(model="tiny", input="x", previous_response_id=first.id)
        hidden = client.responses.create(model="tiny", input="Hi", store=False)
        assert server.get(f"{PATH}/{hidden.id}").status == 404


def test_nobody_sees_what_was_stored_with_another_key():
    with client_of("Hello", "no tools", api_keys=("one", "two")) as (client, server):
        response = client.responses.create(model="tiny", input="Hi")
        other = {"X-API-Key": "two"}
        path = f"{PATH}/{response.id}"
        assert server.get(path, {"Authorization": "Bearer one"}).status == 200
        assert server.get(path, other).status == 404
        assert server.send("DELETE", path, headers=other).status == 404
        body = {"input": "x", "previous_response_id": response.id}
        assert server.post(PATH, body, other).status == 404
        body = {"input": [{"id": response.output[0].id}]}
        assert server.post(PATH, body, other).status == 404
        assert server.get(path).status == 401


def test_streamed_answers_are_stored_too(hello: RunningServer):
    answer = hello.post(PATH, {"input": "Hi", "stream": True})
    last = answer.events[-1]
    assert last["type"] == "response.completed"
    assert hello.get(f"{PATH}/{last['response']['id']}").json == last["response"]


def test_an_answer_that_is_cut_is_incomplete():
    with client_of("Hello there", "no tools") as (client, _):
        response = ask_both(client, input="Hi", max_output_tokens=3)
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"


def test_a_cut_call_is_incomplete():
    with client_of(CALLS["json_tools"]) as (client, _):
        response = ask_both(client, input="x", tools=[TOOL], max_output_tokens=40)
        assert response.status == "incomplete"
        assert response.output[-1].status == "incomplete"


def test_tools_of_namespaces_and_tools_of_plain_text_come_back_as_what_they_are():
    calls = (
        '<tool_call>\n{"name": "box__open", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n\\"b\\""}}\n</tool_call>'
    )
    tools: list[Any] = [
        {"type": "namespace", "name": "box", "description": "", "tools": [TOOL | {"name": "open"}]},
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
        },
        {"type": "web_search"},
    ]
    with client_of(calls) as (client, server):
        response = ask_both(client, input="x", tools=tools)
        inside, custom = response.output
        assert (inside.namespace, inside.name) == ("box", "open")
        assert (custom.type, custom.name, custom.input) == (
            "custom_tool_call",
            "patch",
            'a\n"b"',
        )
        back = [
            {"role": "user", "content": "x"},
            *(item.model_dump(exclude_none=True) for item in response.output),
            {"type": "function_call_output", "call_id": inside.call_id, "output": "ok"},
            {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "ok"},
        ]
        for item in back:
            item.pop("parsed_arguments", None)
        answer = server.post(PATH, {"input": back, "tools": tools})
        assert answer.status == 200
        assert answer.headers["x-ignored-fields"] == "tools.web_search"
        usage = answer.json["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] > response.usage.input_tokens - 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "banana"}]}, "input[0].type"),
        ({"input": [{"role": "banana", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input[0].call_id",
        ),
        ({"input": [{"type": "reasoning", "content": [5]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": 5}, "tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "banana"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "banana"}}, "reasoning.effort"),
        ({"stop": 5}, "stop"),
    ],
)
def test_what_is_wrong_is_told_by_the_requests_own_names(
    hello: RunningServer, fields: dict[str, Any], param: str
):
    given = fields if "input" in fields or not fields else {"input": "x", **fields}
    for stream in (False, True):
        answer = hello.post(PATH, {**given, "stream": stream})
        assert answer.status == 400
        assert answer.error["param"] == param


def test_neutral_values_are_accepted(hello: RunningServer):
    body = {
        "input": "x",
        "background": False,
        "truncation": "disabled",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "include": ["web_search_call.action.sources"],
        "prompt_cache_key": "k",
        "stream_options": {"include_obfuscation": False},
    }
    answer = hello.post(PATH, body)
    assert answer.status == 200
    assert "x-ignored-fields" not in answer.headers
    assert answer.json["output"][0]["content"][0]["text"] == "Hello"
