"""Turns of the assistant: calls that must be made, in every way of writing them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.structured import StructuredOutputs
from pagedmlx.engine.grammars import grammar_backend
from pagedmlx.engine.tool_syntax import find_tool_syntax
from pagedmlx.engine.turn import ChatModel, Turn
from pagedmlx.errors import InvalidRequestError
from pagedmlx.text.answer_parser import answer_parser, parse_answer
from pagedmlx.text.tokenizer import Tokenizer
from pagedmlx.text.tool_grammar import MAX_CALLS
from tests.support.answers import CALLS, TOOLS, calls_of, plain
from tests.support.scripted import HERMES, MODELS

ASK = [{"role": "user", "content": "Which?"}]
CALLERS = ["hermes", "coder", "mistral", "gemma", "gpt-oss", "no tools"]
SWITCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "switch",
        "parameters": {
            "type": "object",
            "properties": {
                "lamp": {"type": "string", "enum": ["left", 'the "right" one']},
                "on": {"type": "boolean"},
                "levels": {"type": "array", "items": {"$ref": "#/$defs/level"}, "maxItems": 2},
            },
            "required": ["lamp", "on"],
            "$defs": {"level": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    },
}
NOTHING: dict[str, Any] = {"type": "function", "function": {"name": "do_nothing"}}


def model_of(name: str) -> ChatModel:
    tokenizer = MODELS[name].tokenizer()
    return SimpleNamespace(  # type: ignore[return-value]
        tokenizer=tokenizer, answer_style=tokenizer.find_style(find_tool_syntax)
    )


def grammar_of(model: ChatModel, turn: Turn, **params: Any) -> StructuredOutputs:
    structured = turn.job(model, SamplingParams(**params)).sampling_params.structured
    assert structured is not None
    return structured


def written(model: ChatModel, structured: StructuredOutputs, seed: int) -> str:
    """Some text that a grammar lets through."""
    tokenizer, chance = model.tokenizer, random.Random(seed)
    matcher = grammar_backend(tokenizer, tokenizer.vocab_size).compile(structured).start()
    tokens: list[int] = []
    while len(tokens) < 1000:
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        token = chance.choice(np.flatnonzero(bits).tolist())
        if token in tokenizer.eos_token_ids:
            return tokenizer.decode(tokens, skip_special_tokens=False)
        tokens.append(token)
        if matcher.advance(token):
            return tokenizer.decode(tokens, skip_special_tokens=False)
    raise AssertionError("it doesn't end")


def is_let_through(model: ChatModel, structured: StructuredOutputs, text: str) -> bool:
    """Whether a grammar lets through a text, with the model's own tokens."""
    tokenizer: Tokenizer = model.tokenizer
    matcher = grammar_backend(tokenizer, tokenizer.vocab_size).compile(structured).start()
    is_over = False
    for token in tokenizer.encode(text, add_special_tokens=False):
        mask = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        if is_over or not mask[token]:
            return False
        is_over = matcher.advance(token)
    mask = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return is_over or any(mask[token] for token in tokenizer.eos_token_ids)


@pytest.mark.parametrize("name", CALLERS)
def test_whatever_is_written_where_a_call_must_be_made_is_one(name: str):
    model = model_of(name)
    turn = Turn.read(
        model, ASK, tools=[SWITCH, NOTHING], tool_choice="required", reasoning_effort=None
    )
    # A thought may come before it, of any length: that is left out here.
    structured = StructuredOutputs(
        grammar=(grammar_of(model, turn).grammar or "").replace("thought? ", "")
    )
    names: set[str] = set()
    for seed in range(6):
        text = written(model, structured, seed)
        parser = turn.parser(model, _prepared(structured))
        parts = parse_answer(parser, text)
        assert parser.has_tool_calls, text
        assert {part[0] for part in plain(parts)} == {"call", "arguments", "end"}, text
        for call in calls_of(parts):
            names.add(call.name)
            arguments = json.loads(call.arguments)
            if call.name == "do_nothing":
                assert arguments == {}
                continue
            assert arguments["lamp"] in ("left", 'the "right" one')
            assert isinstance(arguments["on"], bool)
            assert all(0 <= level <= 9 for level in arguments.get("levels", ()))
            assert arguments.keys() <= {"lamp", "on", "levels"}
    assert names == {"switch", "do_nothing"}


@pytest.mark.parametrize("name", CALLERS)
def test_a_named_tool_is_the_only_one_that_can_be_called_and_is_called_once(name: str):
    model = model_of(name)
    choice = {"type": "function", "function": {"name": "do_nothing"}}
    turn = Turn.read(model, ASK, tools=[SWITCH, NOTHING], tool_choice=choice)
    structured = StructuredOutputs(
        grammar=(grammar_of(model, turn).grammar or "").replace("thought? ", "")
    )
    for seed in range(3):
        parser = turn.parser(model, _prepared(structured))
        calls = calls_of(parse_answer(parser, written(model, structured, seed)))
        assert [(call.name, call.arguments) for call in calls] == [("do_nothing", "{}")]


def test_models_write_calls_that_must_be_made_as_they_are_used_to():
    for name, call in (
        ("hermes", CALLS["json_tools"]),
        ("hermes", f"<think>\nHm? < 5\n</think>\n\n{CALLS['json_tools']}"),
        ("hermes", f"{CALLS['json_tools']}\n{CALLS['json_tools']}"),
        ("coder", CALLS["qwen3_coder"]),
        ("coder", f"<think>Hm.</think>\n{CALLS['qwen3_coder']}"),
        ("coder", CALLS["qwen3_coder"].replace("Oslo", "Os</parameter>\n\nlo <b>")),
        ("mistral", CALLS["mistral"]),
        ("mistral", f"[THINK]Hm.[/THINK]{CALLS['mistral']}"),
        ("gemma", CALLS["json_tools"]),
        ("no tools", CALLS["json_tools"]),
        ("gpt-oss", _harmony("Hm.")),
        ("gpt-oss", _harmony("")),
    ):
        model = model_of(name)
        turn = Turn.read(model, ASK, tools=list(TOOLS), tool_choice="required")
        structured = grammar_of(model, turn)
        assert is_let_through(model, structured, call), (name, call)
        assert not is_let_through(model, structured, "It rains.")
        assert not is_let_through(model, structured, "")


def test_a_model_that_always_goes_on_comes_to_an_end_of_its_calls():
    model = model_of("hermes")
    turn = Turn.read(model, ASK, tools=[NOTHING], tool_choice="required")
    structured = grammar_of(model, turn)
    call = '<tool_call>\n{"name": "do_nothing", "arguments": {}}\n</tool_call>'
    assert is_let_through(model, structured, "\n".join([call] * MAX_CALLS))
    assert not is_let_through(model, structured, "\n".join([call] * (MAX_CALLS + 1)))


def test_the_grammar_begins_behind_a_thought_that_the_prompt_opens():
    model = model_of("hermes")
    for opens, after in ((True, "</think>"), (False, "")):
        turn = Turn.read(
            model,
            ASK,
            tools=list(TOOLS),
            tool_choice="required",
            chat_template_kwargs={"opens_thinking": opens},
        )
        assert grammar_of(model, turn).after == after
        plain_turn = Turn.read(model, ASK, chat_template_kwargs={"opens_thinking": opens})
        wanted = StructuredOutputs(json_object=True)
        assert grammar_of(model, plain_turn, structured=wanted).after == after
    off = Turn.read(model, ASK, tools=list(TOOLS), tool_choice="required", reasoning_effort="none")
    assert "thought" not in (grammar_of(model, off).grammar or "")


def test_an_answer_of_a_form_may_call_tools_instead():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for name in ("hermes", "no tools", "coder"):
        model = model_of(name)
        turn = Turn.read(model, ASK, tools=list(TOOLS))
        call = CALLS["qwen3_coder" if name == "coder" else "json_tools"]
        for wanted, text in (
            (StructuredOutputs(json_schema=json.dumps(schema)), '{"a": 5}'),
            (StructuredOutputs(json_object=True), '{"b": [1]}'),
            (StructuredOutputs(choice=("yes", "no")), "no"),
            (StructuredOutputs(regex=r"[a-c]+/\d"), "abc/5"),
        ):
            structured = grammar_of(model, turn, structured=wanted)
            assert is_let_through(model, structured, text)
            assert is_let_through(model, structured, call)
            assert not is_let_through(model, structured, "It rains.")
        with pytest.raises(InvalidRequestError, match="leaves no room"):
            turn.job(
                model,
                SamplingParams(structured=StructuredOutputs(grammar='start: "a"')),  # type: ignore[arg-type]
            )
    harmony = model_of("gpt-oss")
    structured = grammar_of(harmony, Turn.read(harmony, ASK, tools=list(TOOLS)), structured=wanted)
    assert structured.after == "<|channel|>final<|message|>"


def test_a_call_that_must_be_made_leaves_no_room_for_a_form():
    model = model_of("hermes")
    turn = Turn.read(model, ASK, tools=list(TOOLS), tool_choice="required")
    with pytest.raises(InvalidRequestError, match="tool_choice"):
        turn.job(model, SamplingParams(structured=StructuredOutputs(json_object=True)))


def test_allowed_tools_are_the_only_ones_that_are_told_or_called():
    model = model_of("no tools")
    allowed = {"type": "function", "function": {"name": "get_time"}}
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [allowed]}}
        turn = Turn.read(model, ASK, tools=list(TOOLS), tool_choice=choice)
        job = turn.job(model, SamplingParams())
        assert job.messages is not None
        told = job.messages[0]["content"]
        assert "get_time" in told
        assert ("get_weather" in told) == (mode == "required")
        grammar = job.sampling_params.structured
        assert (grammar is not None) == (mode == "required")
        if grammar is not None:
            assert "get_weather" not in (grammar.grammar or "")


def test_tools_that_a_template_refuses_or_forgets_are_told_all_the_same():
    telling = "{{ tool | tojson }}\n"
    assert telling in HERMES
    for instead in ("{{ tool.function.description + '' }}", "There is a tool."):
        template = HERMES.replace(telling, instead)
        tokenizer = replace(MODELS["hermes"], template=template).tokenizer()
        model: Any = SimpleNamespace(
            tokenizer=tokenizer, answer_style=tokenizer.find_style(find_tool_syntax)
        )
        assert model.answer_style.tools is not None
        turn = Turn.read(model, ASK, tools=[NOTHING])
        job = turn.job(model, SamplingParams())
        assert not turn.is_native
        assert "do_nothing" in tokenizer.render_chat(job.messages, **job.chat_template_kwargs).text
        parser = turn.parser(model, _prepared(StructuredOutputs(json_object=True)))
        call = '<tool_call>{"name": "do_nothing"}</tool_call>'
        assert [each.name for each in calls_of(parse_answer(parser, call))] == ["do_nothing"]


def _harmony(thought: str) -> str:
    call = (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Oslo", "days": 2}'
    )
    lead = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    return lead + call


def _prepared(structured: StructuredOutputs) -> Any:
    return SimpleNamespace(
        params=SamplingParams(structured=structured), prompt_token_ids=tuple(range(5, 20))
    )


def test_parsers_of_turns_without_tools_find_none():
    model = model_of("hermes")
    parser = Turn.read(model, ASK).parser(model, _prepared(StructuredOutputs(json_object=True)))
    assert plain(parse_answer(parser, CALLS["json_tools"])) == [("text", CALLS["json_tools"])]
    assert plain(parse_answer(answer_parser(model.answer_style), "a")) == [("text", "a")]
