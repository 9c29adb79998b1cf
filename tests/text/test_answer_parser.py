"""Answers taken apart: reasoning, content, calls; whole or in pieces, well-formed or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.text.answer_parser import answer_parser, join_parts, parse_answer, to_message
from pagedmlx.text.answer_style import HARMONY_TOKENS, AnswerStyle
from tests.support.answers import ARGUMENTS, CALLS, TOOLS, calls_of, in_pieces, plain, syntax_of

THINK = AnswerStyle(think=("<think>", "</think>"))
CHANNELS = AnswerStyle(
    think=("<|channel>thought", "<channel|>"), control=("<|channel>", "<channel|>")
)
HARMONY = AnswerStyle(is_harmony=True, control=HARMONY_TOKENS)
JSON = syntax_of("json_tools")


def parts_of(text: str, style: AnswerStyle = THINK, **settings: object) -> list[tuple[str, ...]]:
    """The parts of a text that comes whole; they are the same character by character."""

    def parser():
        return answer_parser(style, **settings)  # type: ignore[arg-type]

    whole = plain(parse_answer(parser(), text))
    assert plain(in_pieces(parser(), text)) == whole
    return whole


def test_text_without_marks_stays_as_it_is():
    for text in ("", "Hello", " \n two  spaces \n", "a < b, <thin", "1 </think> 2"):
        for tools in ((), TOOLS):
            for style in (AnswerStyle(), THINK, CHANNELS):
                found = parts_of(text, style, tools=tools, syntax=JSON)
                assert found == ([("text", text)] if text else [])


@pytest.mark.parametrize("name", CALLS)
def test_every_syntax_gives_its_calls(name: str):
    call = CALLS[name]
    several = [call, f"{call}\n{call}"]
    leads = ("",) if name == "llama" else ("", "I look it up.\n\n")
    for lead in leads:
        for text in several:
            parser = answer_parser(THINK, tools=TOOLS, syntax=syntax_of(name))
            parts = in_pieces(parser, lead + text)
            calls = calls_of(parts)
            assert [each.name for each in calls] == ["get_weather"] * (1 + (text != call))
            assert all(json.loads(each.arguments) == ARGUMENTS for each in calls)
            assert to_message(parts).content == lead.strip()
            assert parser.has_tool_calls
            whole = answer_parser(THINK, tools=TOOLS, syntax=syntax_of(name))
            assert plain(parse_answer(whole, lead + text)) == plain(parts)


@pytest.mark.parametrize("name", CALLS)
def test_a_broken_call_is_text_and_nothing_of_it_is_lost(name: str):
    syntax = syntax_of(name)
    for inner in ("", "nonsense", "{}", '{"name": 5}', "[1]", '{"name": "x", "age": 3}', "<x>"):
        text = f"see {syntax.start}{inner}{syntax.end} there"
        found = parts_of(text, tools=TOOLS, syntax=syntax)
        assert "".join(part[1] for part in found) == text
        assert {part[0] for part in found} == {"text"}


def test_without_tools_nothing_is_a_call():
    text = CALLS["json_tools"]
    assert parts_of(text, AnswerStyle(tools=JSON)) == [("text", text)]


def test_json_arguments_come_as_they_are_written():
    parser = answer_parser(AnswerStyle(tools=JSON), tools=TOOLS)
    begun = parser.add('<tool_call>{"name": "get_weather", "arguments": {"ci')
    assert plain(begun) == [("call", "0", "get_weather"), ("arguments", "0", '{"ci')]
    assert plain(parser.add('ty": "a}b')) == [("arguments", "0", 'ty": "a}b')]
    assert plain(parser.add('\\"</tool_call>"}')) == [
        ("arguments", "0", '\\"</tool_call>"}'),
        ("end", "0"),
    ]
    assert plain(parser.add("}</tool_call>")) == []
    assert parser.has_tool_calls


def test_other_orders_and_forms_of_json_are_read_at_the_end():
    for body in (
        '{"arguments": {"city": "Oslo", "days": 2}, "name": "get_weather"}',
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\", \\"days\\": 2}"}',
        '[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}]',
    ):
        found = parts_of(f"<tool_call>{body}</tool_call>", tools=TOOLS, syntax=JSON)
        assert found[0] == ("call", "0", "get_weather")
        assert json.loads(found[1][2]) == ARGUMENTS
    assert parts_of('<tool_call>{"name": "get_time"}</tool_call>', tools=TOOLS, syntax=JSON) == [
        ("call", "0", "get_time"),
        ("arguments", "0", "{}"),
        ("end", "0"),
    ]


def test_a_call_that_is_cut_off_shows_what_there_is():
    call = CALLS["json_tools"]
    named = call.index('{"city')
    for length in range(1, len(call)):
        parser = answer_parser(THINK, tools=TOOLS, syntax=JSON)
        found = plain(parse_answer(parser, call[:length]))
        if length <= named:
            assert found == [("text", call[:length])]
            continue
        assert found[0] == ("call", "0", "get_weather")
        assert call[named:length].startswith(found[1][2])
        assert parser.has_tool_calls == (("end", "0") in found) == (found[1][2][-2:] == "2}")


def test_arguments_that_are_broken_come_as_they_are():
    text = '<tool_call>{"name": "get_time", "arguments": {"a": }</tool_call> and more'
    assert parts_of(text, tools=TOOLS, syntax=JSON) == [
        ("call", "0", "get_time"),
        ("arguments", "0", '{"a": }'),
        ("end", "0"),
        ("text", " and more"),
    ]
    text = '<tool_call>{"name": "get_time", "arguments": {"a": 1</tool_call>'
    assert parts_of(text, tools=TOOLS, syntax=JSON)[1:] == [
        ("arguments", "0", '{"a": 1'),
        ("end", "0"),
    ]


def test_values_between_tags_come_while_they_are_written():
    parser = answer_parser(AnswerStyle(), tools=TOOLS, syntax=syntax_of("qwen3_coder"))
    begun = parser.add("<tool_call>\n<function=get_weather>\n<parameter=city>\nOs")
    assert plain(join_parts(begun)) == [
        ("call", "0", "get_weather"),
        ("arguments", "0", '{"city": "Os'),
    ]
    assert plain(parser.add('lo "x"\n')) == [("arguments", "0", 'lo \\"x\\"')]
    rest = "y\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    assert plain(join_parts([*parser.add(rest), *parser.finish()])) == [
        ("arguments", "0", '\\ny", "days": 2}'),
        ("end", "0"),
    ]
    cut = parts_of(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs",
        tools=TOOLS,
        syntax=syntax_of("qwen3_coder"),
    )
    assert cut == [("call", "0", "get_weather"), ("arguments", "0", '{"city": "Os')]


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "\n  a\n\n", "\n  a\n\n"),
        ({"type": "string"}, "", ""),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "0.5", 0.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "array", "items": {}}, '[1, {"a": "b"}]', [1, {"a": "b"}]),
        ({"type": "object"}, "not JSON", "not JSON"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "five", "five"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, '"quoted"', '"quoted"'),
        ({"enum": ["a", "b"]}, "a", "a"),
        ({}, "{}", "{}"),
        ({"type": "string"}, "a </parameter> b", "a </parameter> b"),
    ],
)
def test_values_between_tags_have_the_types_of_the_schema(schema: dict, value: str, expected):
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
    syntax = syntax_of("qwen3_coder")
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n"
    for end in ("</tool_call>", ""):
        found = parts_of(text + end, tools=[{"type": "function", "function": tool}], syntax=syntax)
        assert json.loads(found[1][2]) == {"x": expected}
        assert [part[0] for part in found] == ["call", "arguments", "end"]


def test_a_call_may_begin_before_the_last_one_was_closed():
    one = '<tool_call>{"name": "get_time", "arguments": {}}'
    found = parts_of(f"{one}\n{one}\n</tool_call>", tools=TOOLS, syntax=JSON)
    assert [part[0] for part in found] == ["call", "arguments", "end"] * 2


def test_only_the_first_call_is_kept_where_one_is_allowed():
    text = f"{CALLS['json_tools']}\n{CALLS['json_tools']}\nDone."
    found = parts_of(text, tools=TOOLS, syntax=JSON, max_calls=1)
    assert [part[0] for part in found] == ["call", "arguments", "end", "text"]


def test_a_models_own_ids_are_kept_and_others_have_the_form_its_template_takes():
    kimi = answer_parser(THINK, tools=TOOLS, syntax=syntax_of("kimi_k2"))
    assert calls_of(parse_answer(kimi, CALLS["kimi_k2"]))[0].call_id == "functions.get_weather:0"
    mistral = answer_parser(THINK, tools=TOOLS, syntax=syntax_of("mistral"))
    call_id = calls_of(parse_answer(mistral, CALLS["mistral"]))[0].call_id
    assert len(call_id) == 9
    assert call_id.isalnum()
    parser = answer_parser(THINK, tools=TOOLS, syntax=JSON)
    calls = calls_of(parse_answer(parser, CALLS["json_tools"] * 2))
    assert calls[0].call_id != calls[1].call_id
    assert calls[0].call_id.startswith("call_")


def test_reasoning_is_told_apart_whoever_opens_it():
    answer = [("reasoning", "Hm.\nYes."), ("text", "Hello")]
    assert parts_of("<think>\nHm.\nYes.\n</think>\n\nHello") == answer
    assert parts_of("\n<think>Hm.\nYes.</think>Hello") == answer
    assert parts_of("\nHm.\nYes.\n</think>\n\nHello", is_thinking=True) == answer
    # Some models write the tag again.
    assert parts_of("<think>\nHm.\nYes.\n</think>\nHello", is_thinking=True) == answer


def test_a_thought_that_is_cut_off_is_reasoning():
    assert parts_of("Hm. And</thi", is_thinking=True) == [("reasoning", "Hm. And</thi")]
    assert parts_of("<think>Hm.") == [("reasoning", "Hm.")]
    assert parts_of("<think>") == []


def test_an_empty_thought_is_none():
    assert parts_of("<think>\n\n</think>\n\nHello") == [("text", "Hello")]


def test_tags_within_an_answer_are_text_unless_they_are_special_tokens():
    text = "The tags <think> and </think> stand around it."
    assert parts_of(text) == [("text", text)]
    found = parts_of("Well.<|channel>thought\nHm.<channel|>Hello", CHANNELS)
    assert found == [("text", "Well."), ("reasoning", "Hm."), ("text", "Hello")]
    assert parts_of("<channel|>Hello<|channel>", CHANNELS) == [("text", "Hello")]


def test_reasoning_then_content_then_calls():
    text = f"<think>Hm.</think>\n\nI look.\n\n{CALLS['json_tools']}"
    found = parts_of(text, tools=TOOLS, syntax=JSON)
    assert [part[0] for part in found] == ["reasoning", "text", "call", "arguments", "end"]
    assert found[1] == ("text", "I look.")


def test_channels_of_harmony_are_told_apart():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello<|return|>"
    )
    assert parts_of(text, HARMONY) == [("reasoning", "Hm."), ("text", "Hello")]
    assert parts_of(text[:40], HARMONY) == [("reasoning", "Hm.")]
    assert parts_of("<|channel|>analysis<|message|>Hm. And", HARMONY) == [("reasoning", "Hm. And")]
    assert parts_of("Just text", HARMONY) == [("text", "Just text")]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json",
        " to=functions.get_weather<|channel|>commentary json",
        "<|channel|>commentary to=get_weather",
    ],
)
def test_calls_of_harmony(header: str):
    body = '{"city": "Oslo", "days": 2}'
    lead = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for end in ("<|call|>", ""):
        found = parts_of(f"{lead}{header}<|message|>{body}{end}", HARMONY, tools=TOOLS)
        assert found == [
            ("reasoning", "Hm."),
            ("call", "0", "get_weather"),
            ("arguments", "0", body),
            ("end", "0"),
        ]
    cut = parts_of(f'{header}<|message|>{{"city', HARMONY, tools=TOOLS)
    assert cut == [("call", "0", "get_weather"), ("arguments", "0", '{"city')]
    empty = parts_of(f"{header}<|message|><|call|>", HARMONY, tools=TOOLS)
    assert empty[1] == ("arguments", "0", "{}")


def test_a_preamble_of_harmony_is_text():
    text = (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final"
        "<|message|>It rains.<|return|>"
    )
    assert parts_of(text, HARMONY) == [("text", "I look.\n\nIt rains.")]


TOKENS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "\n", " "),
    *('{"name": "get_time", "arguments": ', '{"name"', "{", "}", '"', "\\", ": 1", "[", "]", ","),
    *("<", "|", ">", "get_time", "<function=", "</function>", "<|channel>thought", "<channel|>"),
    *("<|tool_call>", "call:get_time{", "<tool_call|>", "Hello", "é", "assistant", " to="),
    *("<function=get_weather>", "<parameter=city>", "<parameter=days>\n", "</parameter>", "2"),
    *HARMONY_TOKENS,
]
STYLES = [
    (AnswerStyle(), JSON),
    (THINK, JSON),
    (THINK, syntax_of("llama")),
    (THINK, syntax_of("qwen3_coder")),
    (AnswerStyle(control=("[TOOL_CALLS]", "[ARGS]")), syntax_of("mistral")),
    (CHANNELS, syntax_of("gemma4")),
    (HARMONY, None),
]


@given(
    tokens=st.lists(st.sampled_from(TOKENS), max_size=24),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    kind=st.sampled_from(STYLES),
    is_thinking=st.booleans(),
)
def test_how_the_text_is_cut_makes_no_difference(
    tokens: Sequence[str], cuts: Sequence[int], kind: tuple, is_thinking: bool
):
    style, syntax = kind
    text = "".join(tokens)

    def parser():
        return answer_parser(style, tools=TOOLS, syntax=syntax, is_thinking=is_thinking)

    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    whole = plain(in_pieces(parser(), [text]))
    assert plain(in_pieces(parser(), pieces)) == whole
    assert plain(in_pieces(parser(), text)) == whole


@given(
    text=st.text(st.sampled_from('ab<|>{}[]"\\/ \n:,thinkcal_')),
    kind=st.sampled_from(STYLES[:4]),
)
def test_plain_text_is_never_lost(text: str, kind: tuple):
    style, syntax = kind
    if "<think>" in text:
        return
    parts = parse_answer(answer_parser(style, tools=TOOLS, syntax=syntax), text)
    assert to_message(parts).content == text
    assert to_message(parts).reasoning == ""
