"""LLM.chat with tools and reasoning: the answer's message, and the conversation going on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import pagedmlx.llm
from pagedmlx import LLM
from pagedmlx.errors import InvalidRequestError
from tests.support.answers import ARGUMENTS, CALLS, TOOLS
from tests.support.scripted import MODELS, playing

Played = Callable[[str, str], LLM]
ASK = [{"role": "user", "content": "How is the weather in Oslo?"}]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    with ExitStack() as stack:

        def make(model: str, text: str) -> LLM:
            build = playing(MODELS[model], text)
            with monkeypatch.context() as patch:
                patch.setattr(pagedmlx.llm, "load_engine", lambda _config, _report: build())
                return stack.enter_context(LLM("fake"))

        yield make


def test_an_answer_has_its_text_and_its_message(played: Played):
    text = f"<think>Hm.</think>I look.\n{CALLS['json_tools']}"
    llm = played("hermes", text)
    output = llm.chat(ASK, tools=TOOLS)[0].outputs[0]
    assert output.text == text
    message = output.message
    assert message is not None
    assert (message.reasoning, message.content) == ("Hm.", "I look.")
    (call,) = message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)
    result = {"role": "tool", "tool_call_id": call.call_id, "content": "Rain."}
    again = llm.chat([*ASK, message.as_dict(), result], tools=TOOLS)[0]
    assert again.outputs[0].message is not None
    assert len(again.prompt_token_ids) > len(llm.chat(ASK, tools=TOOLS)[0].prompt_token_ids)


def test_without_tools_the_message_is_content_and_reasoning(played: Played):
    llm = played("gemma", "<|channel>thought\nHm.<channel|>Hello")
    both = llm.chat([ASK, ASK])
    for output in both:
        message = output.outputs[0].message
        assert message is not None
        assert message.as_dict() == {
            "role": "assistant",
            "content": "Hello",
            "reasoning_content": "Hm.",
        }
    assert llm.generate("Hello")[0].outputs[0].message is None


def test_what_is_off_is_refused_before_anything_runs(played: Played):
    llm = played("hermes", "Hello")
    with pytest.raises(InvalidRequestError, match="tools"):
        llm.chat(ASK, tools=[{"type": "function"}])
    with pytest.raises(InvalidRequestError, match="tool_choice"):
        llm.chat(ASK, tool_choice="required")
    with pytest.raises(InvalidRequestError, match="reasoning_effort"):
        llm.chat(ASK, reasoning_effort="a lot")
