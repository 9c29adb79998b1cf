"""Tools and reasoning over the official client: every way of writing, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from pagedmlx.config import EngineConfig
from pagedmlx.engine.load import load_engine
from tests.support.answers import ARGUMENTS, CALLS, TOOLS, Message, gather
from tests.support.scripted import MODELS, playing
from tests.support.server import RunningServer, serving
from tests.support.tiny_models import save_tiny_folder

ASK: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]
THOUGHT_OF_HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL_OF_HARMONY = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Oslo", "days": 2}'
)
SCRIPTS = {
    "hermes": (f"<think>\nHm.\n</think>\n\nI look.\n\n{CALLS['json_tools']}", "I look.", "Hm."),
    "coder": (f"I look.\n\n{CALLS['qwen3_coder']}", "I look.", None),
    "mistral": (f"[THINK]Hm.[/THINK]I look.{CALLS['mistral']}", "I look.", "Hm."),
    "gemma": (f"<|channel>thought\nHm.\n<channel|>{CALLS['gemma4']}", None, "Hm."),
    "gpt-oss": (f"{THOUGHT_OF_HARMONY}{CALL_OF_HARMONY}", None, "Hm."),
    "no tools": (f"I look.\n{CALLS['json_tools']}", "I look.", None),
}
"""What each model writes, and what content and reasoning that is."""


@contextmanager
def client_of(
    model: str, text: str | Sequence[str], **settings: Any
) -> Iterator[tuple[openai.OpenAI, RunningServer]]:
    with serving(playing(MODELS[model], text, **settings)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield client, server
        server.assert_idle()


def ask(client: openai.OpenAI, messages: Any = ASK, **settings: Any) -> Message:
    """The answer, which is the same whole and streamed."""
    create = client.chat.completions.create
    whole = gather([create(model="tiny", messages=messages, **settings)])
    streamed = gather(create(model="tiny", messages=messages, stream=True, **settings))
    assert streamed == whole
    return whole[0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_thoughts_content_and_calls_of_every_model(name: str):
    text, content, reasoning = SCRIPTS[name]
    with client_of(name, text) as (client, _):
        message = ask(client, tools=TOOLS)
        assert message.content == content
        assert message.reasoning == reasoning
        assert [call.name for call in message.calls] == ["get_weather"]
        assert json.loads(message.calls[0].arguments) == ARGUMENTS
        assert message.finish_reason == "tool_calls"
        # And back: the call with its result, and then the answer.
        again = [
            *ASK,
            {
                "role": "assistant",
                "content": message.content,
                "reasoning_content": message.reasoning,
                "tool_calls": [
                    {
                        "id": message.calls[0].call_id,
                        "type": "function",
                        "function": {
                            "name": message.calls[0].name,
                            "arguments": message.calls[0].arguments,
                        },
                    }
                ],
            },
            {
                "role": "tool",
                "tool_call_id": message.calls[0].call_id,
                "content": [{"type": "text", "text": "Rain."}],
            },
        ]
        assert ask(client, again, tools=TOOLS).finish_reason == "tool_calls"


def test_two_calls_have_ids_and_numbers_of_their_own():
    text = f"{CALLS['json_tools']}\n{CALLS['json_tools']}"
    with client_of("hermes", text) as (client, _):
        calls = ask(client, tools=TOOLS).calls
        assert len(calls) == 2
        assert calls[0].call_id != calls[1].call_id
        alone = ask(client, tools=TOOLS, parallel_tool_calls=False)
        assert len(alone.calls) == 1
        assert alone.finish_reason == "tool_calls"


def test_several_choices_call_each_for_itself():
    texts = [CALLS["json_tools"], "It rains.", f"<think>Hm.</think>{CALLS['json_tools']}"]
    with client_of("hermes", texts) as (client, _):
        create = client.chat.completions.create
        whole = gather([create(model="tiny", messages=ASK, tools=TOOLS, n=3)])
        streamed = gather(create(model="tiny", messages=ASK, tools=TOOLS, n=3, stream=True))
        assert streamed == whole
        assert [each.finish_reason for each in whole] == ["tool_calls", "stop", "tool_calls"]
        assert [each.reasoning for each in whole] == [None, None, "Hm."]


def test_what_is_no_call_stays_content():
    with client_of("hermes", "<tool_call>\nI won't.\n</tool_call>") as (client, _):
        message = ask(client, tools=TOOLS)
        assert message.content == "<tool_call>\nI won't.\n</tool_call>"
        assert message.finish_reason == "stop"


def test_without_tools_or_with_tool_choice_none_nothing_is_a_call():
    with client_of("hermes", CALLS["json_tools"]) as (client, _):
        for settings in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            message = ask(client, **settings)
            assert message.content == CALLS["json_tools"]
            assert message.calls == ()
            assert message.finish_reason == "stop"


def test_arguments_that_the_limit_cuts_end_with_length():
    with client_of("hermes", CALLS["json_tools"]) as (client, server):
        num = len(server.worker.engine.tokenizer.encode(CALLS["json_tools"].partition('"days')[0]))
        message = ask(client, tools=TOOLS, max_tokens=num)
        assert message.finish_reason == "length"
        assert message.calls[0].arguments.startswith('{"city": "Oslo"')


def test_marks_that_are_special_tokens_never_reach_the_client():
    text = "<|channel>thought\nHm.<channel|>One<tool_call|> two<|tool_call> three<|channel>"
    with client_of("gemma", text) as (client, _):
        message = ask(client, tools=TOOLS)
        assert message.content == "One two three"
        assert ask(client).content == "One two three"


def test_a_thought_that_the_limit_cuts_is_reasoning():
    with client_of("hermes", "<think>Hm, well. What now?</think>Hello") as (client, _):
        message = ask(client, max_tokens=10)
        assert message.finish_reason == "length"
        assert "<think>Hm, well. What now?</think>".startswith(f"<think>{message.reasoning}")
        assert message.content == ""


def test_a_template_that_opens_the_thought_itself():
    with client_of("hermes", "Hm.\n</think>\n\nHello") as (client, _):
        opened = {"chat_template_kwargs": {"opens_thinking": True}}
        message = ask(client, extra_body=opened)
        assert (message.reasoning, message.content) == ("Hm.", "Hello")
        cut = ask(client, extra_body=opened, max_tokens=2)
        assert (cut.reasoning, cut.content) == ("Hm", "")
        # Whoever speaks of the tag at a message's end opens nothing.
        plain = ask(client, [{"role": "user", "content": "<think>"}])
        assert plain.content == "Hm.\n</think>\n\nHello"


def test_with_thinking_off_all_is_content():
    for settings in (
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        with client_of("hermes", "Hello") as (client, _):
            message = ask(client, **settings)
            assert (message.reasoning, message.content) == (None, "Hello")


def test_reasoning_can_be_left_where_it_is_or_left_out():
    text = "<think>Hm.</think>Hello"
    with client_of("hermes", text) as (client, server):
        assert ask(client, extra_body={"separate_reasoning": False}).content == text
        left_out = ask(client, extra_body={"include_reasoning": False})
        assert (left_out.reasoning, left_out.content) == (None, "Hello")
        usage = server.chat().json["usage"]
        assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < 8


def test_reasoning_effort_reaches_templates_that_know_it():
    with client_of("gpt-oss", "<|channel|>final<|message|>Hello") as (client, server):
        assert ask(client, reasoning_effort="high").content == "Hello"
        prompts = [
            server.chat(reasoning_effort=effort).json["usage"]["prompt_tokens"]
            for effort in ("low", "minimal", "medium")
        ]
        assert prompts[0] == prompts[1] < prompts[2]
        error = server.chat(reasoning_effort="none")
        assert (error.status, error.error["param"]) == (400, "reasoning_effort")
    with client_of("no tools", "Hello") as (client, _):
        assert ask(client, reasoning_effort="high").content == "Hello"
        assert ask(client, reasoning_effort="none").content == "Hello"


@pytest.mark.parametrize("name", ["hermes", "coder", "mistral", "no tools"])
def test_calls_in_the_history_take_any_arguments(name: str):
    with client_of(name, "Noon.") as (client, _):
        for arguments in ('{"a": 1}', "", "not json", "[1]", '{"a": {"b": 2}}'):
            function = {"name": "get_time", "arguments": arguments}
            call = {"id": "call_0123456789abcdef", "type": "function", "function": function}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "12:00"}
            messages = [
                *ASK,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {**result, "name": "get_time"},
                result,
                {"role": "user", "content": "And now?"},
            ]
            for tools in ({}, {"tools": TOOLS}):
                assert ask(client, messages, **tools).content == "Noon."


def test_log_probabilities_are_of_all_tokens():
    with client_of("hermes", SCRIPTS["hermes"][0]) as (client, server):
        whole = server.chat(tools=TOOLS, logprobs=True).json["choices"][0]
        told = whole["logprobs"]["content"]
        assert "".join(each["token"] for each in told) == SCRIPTS["hermes"][0]
        events = server.chat(tools=TOOLS, logprobs=True, stream=True).events[:-1]
        chunks = [event["choices"][0]["logprobs"] for event in events]
        assert [each for chunk in chunks if chunk for each in chunk["content"]] == told
        assert client is not None


def test_a_stop_string_counts_in_all_of_the_text():
    with client_of("hermes", "<think>Hm. Stop.</think>Hello") as (client, _):
        message = ask(client, stop=["Stop"])
        assert (message.reasoning, message.content) == ("Hm.", "")
        assert message.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]},
            "tools[0].function.description",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
                ]
            },
            "tools[0].function.parameters.type",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": 5}, "parallel_tool_calls"),
        ({"functions": [TOOLS[0]["function"]]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"separate_reasoning": "no"}, "separate_reasoning"),
        ({"include_reasoning": 0}, "include_reasoning"),
    ],
)
def test_what_is_off_about_tools_is_refused_with_its_place(
    server: RunningServer, fields: dict[str, Any], param: str
):
    answer = server.chat(**fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.error


def test_a_model_without_a_template_refuses_before_any_stream():
    with client_of("no template", "Hello") as (client, _):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="no chat template"):
                client.chat.completions.create(
                    model="tiny",
                    messages=ASK,
                    tools=TOOLS,
                    stream=stream,
                )
        assert client.completions.create(model="tiny", prompt="a").choices[0].text == "Hello"


def test_a_model_that_says_anything_calls_the_tool_that_it_must(tmp_path: Path):
    folder = save_tiny_folder(tmp_path / "tiny", max_model_len=2048)
    config = EngineConfig(str(folder), num_blocks=160, check_integrity=True)
    levels = {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 2}
    schema = {"type": "object", "properties": {"levels": levels}, "required": ["levels"]}
    tools = [
        {"type": "function", "function": {"name": "set_levels", "parameters": schema}},
        {"type": "function", "function": {"name": "do_nothing"}},
    ]
    with serving(partial(load_engine, config)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for choice in ("required", {"type": "function", "function": {"name": "set_levels"}}):
                message = ask(
                    client,
                    tools=tools,
                    tool_choice=choice,
                    parallel_tool_calls=False,
                    seed=7,
                    temperature=1.0,
                )
                assert message.finish_reason == "tool_calls"
                assert message.content is None
                (call,) = message.calls
                if choice != "required":
                    assert call.name == "set_levels"
                if call.name == "set_levels":
                    assert set(json.loads(call.arguments)["levels"]) <= {1, 2, 3}
            # Whose parameters are at fault is told by name.
            bad = {"type": "object", "properties": {"a": {"type": "banana"}}}
            tools.append({"type": "function", "function": {"name": "slip", "parameters": bad}})
            with pytest.raises(openai.BadRequestError, match=r"parameters of 'slip'.*banana"):
                ask(client, tools=tools, tool_choice="required")
        server.assert_idle()


def test_reasoning_of_the_history_must_be_text(server: RunningServer):
    message = {"role": "assistant", "content": "x", "reasoning_content": [1]}
    answer = server.post(
        "/v1/chat/completions", {"messages": [*ASK, message, *ASK], "max_tokens": 1}
    )
    assert (answer.status, answer.error["param"]) == (400, "messages[1].reasoning_content")
