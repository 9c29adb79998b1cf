"""Grammars over every kind of tokenizer: exact masks, clean ends, and hostile ones refused soon."""

from __future__ import annotations

import json
import random
import re
import threading
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedmlx.core.structured import MAX_CHOICES, GrammarMatcher, StructuredOutputs
from pagedmlx.errors import InvalidRequestError, NoTokenLeftError
from pagedmlx.sampling import grammar as grammar_module
from pagedmlx.sampling.grammar import LLGuidance
from pagedmlx.sampling.vocabulary import Vocabulary
from tests.support.grammars import allowed, backend
from tests.support.tokenizers import (
    byte_tokenizer,
    metaspace_tokenizer,
    sentencepiece_tokenizer,
    smollm2_tokenizer,
    wordpiece_tokenizer,
)

TOKENIZERS = (byte_tokenizer, sentencepiece_tokenizer, metaspace_tokenizer)


def start(make: Any = byte_tokenizer, vocab_size: int | None = None, **fields: Any):
    return backend(make, vocab_size).compile(StructuredOutputs(**fields)).start()


def wander(
    matcher: GrammarMatcher, tokenizer: Any, chance: random.Random, limit: int = 400
) -> tuple[str, bool]:
    """Choose any allowed token again and again; the text, and whether it came to its end."""
    data = b""
    for _ in range(limit):
        token = chance.choice(allowed(matcher.mask()))
        is_end = token in tokenizer.eos_token_ids
        is_whole = matcher.advance(token)
        data += b"" if is_end else tokenizer.token_bytes(token)
        if is_whole:
            return data.decode(), True
    return data.decode(errors="ignore"), False


# What is allowed.


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("seed", range(4))
def test_a_mask_has_just_the_tokens_that_a_choice_can_go_on_with(make: Any, seed: int):
    tokenizer, chance = make(), random.Random(seed)
    choices = [b"the fox", b"the", b"that's it", b"fox", b"no", b"nothing"]
    matcher, text = start(make, choice=tuple(map(bytes.decode, choices))), b""
    while True:
        rest = [each[len(text) :] for each in choices if each.startswith(text)]
        fitting = {
            token
            for token in range(tokenizer.vocab_size)
            if token not in tokenizer.special_token_ids
            and (data := tokenizer.token_bytes(token))
            and any(each.startswith(data) for each in rest)
        }
        mask = set(allowed(matcher.mask()))
        if len({each[:1] for each in rest} | {b""}) == 2 and b"" not in rest:
            # Where there is but one text, its usual tokens are enough.
            assert mask
            assert mask <= fitting
        else:
            assert mask == fitting | (tokenizer.eos_token_ids if b"" in rest else set())
        token = chance.choice(sorted(mask))
        is_whole = matcher.advance(token)
        if token in tokenizer.eos_token_ids:
            assert is_whole
            assert text in choices
            return
        text += tokenizer.token_bytes(token)
        assert is_whole == (text in (b"the fox", b"that's it", b"fox", b"nothing"))
        if is_whole:
            return


def test_as_many_choices_as_may_be_given_can_be_followed():
    choices = [f"option number {index}" for index in range(MAX_CHOICES)]
    matcher = start(smollm2_tokenizer, choice=tuple(choices))
    text, is_whole = wander(matcher, smollm2_tokenizer(), random.Random(1))
    assert is_whole
    assert text in choices


def test_the_models_vocabulary_may_be_larger_or_smaller_than_the_tokenizers():
    tokenizer = byte_tokenizer()
    for size in (tokenizer.vocab_size + 57, 260, 257):
        mask = start(byte_tokenizer, size, regex=r"(?s:.*)").mask()
        assert len(mask) == -(-size // 32)
        text = {
            token
            for token in range(min(size, tokenizer.vocab_size))
            if token not in tokenizer.special_token_ids
        }
        assert set(allowed(mask)) <= text | tokenizer.eos_token_ids
        assert tokenizer.eos_token_ids <= set(allowed(mask))


def test_all_of_the_models_end_tokens_may_end_what_is_whole():
    tokenizer = smollm2_tokenizer()
    assert len(tokenizer.eos_token_ids) > 1
    matcher = start(smollm2_tokenizer, regex="a*")
    assert tokenizer.eos_token_ids <= set(allowed(matcher.mask()))
    for end in tokenizer.eos_token_ids:
        fresh = start(smollm2_tokenizer, regex="a*")
        assert fresh.advance(end)


def test_a_model_without_an_end_token_still_comes_to_an_end():
    tokens = [b"a", b"b", b"ab"]
    vocabulary = Vocabulary(tokens, frozenset(), frozenset(), encode=lambda _: [])
    matcher = LLGuidance(lambda: vocabulary).compile(StructuredOutputs(choice=("ab", "b"))).start()
    assert set(allowed(matcher.mask())) == {0, 1, 2}
    assert not matcher.advance(0)
    assert matcher.advance(1)


def test_special_tokens_come_by_name_only():
    tokenizer = byte_tokenizer()
    mark = tokenizer.token_to_id("<|im_start|>")
    assert mark not in allowed(start(regex=r"(?s:.*)").mask())
    assert allowed(start(grammar='start: <|im_start|> "x"').mask()) == [mark]


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("expression", [r"\d{3}-\d{4}", "^a/b$", " x|y", "", r"[^a]{2}é?"])
def test_whatever_is_chosen_matches_the_expression(make: Any, expression: str):
    if make is metaspace_tokenizer and "[^a]" in expression:
        expression = r"[b-y]{2}é?"
    tokenizer = make()
    for seed in range(5):
        text, ended = wander(start(make, regex=expression), tokenizer, random.Random(seed))
        assert ended
        assert re.fullmatch(expression, text, re.DOTALL)


def test_a_token_that_fits_nowhere_is_an_error_of_its_own():
    matcher = start(choice=("yes", "no"))
    with pytest.raises(NoTokenLeftError):
        matcher.advance(byte_tokenizer().encode("x")[0])


def test_matchers_of_one_grammar_do_not_know_of_each_other():
    grammar = backend(byte_tokenizer).compile(StructuredOutputs(choice=("ab", "cd")))
    first, second = grammar.start(), grammar.start()
    first.advance(byte_tokenizer().encode("a")[0])
    assert allowed(first.mask()) == byte_tokenizer().encode("b")
    assert set(allowed(second.mask())) == set(byte_tokenizer().encode("ac"))


# JSON.

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "n": {"type": "integer", "minimum": -5, "maximum": 12},
            "tags": {"type": "array", "items": {"enum": ["x", 1, None]}, "maxItems": 3},
            "more": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
        },
        "required": ["name", "tags", "more"],
        "additionalProperties": False,
        "$defs": {
            "leaf": {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}, "date": {"format": "date"}},
                "required": ["ok"],
                "additionalProperties": False,
            }
        },
    },
    {"type": "array", "items": {"type": "number", "multipleOf": 0.5, "maximum": 9}, "maxItems": 4},
    {"type": "string", "pattern": "^[a-c]{1,6}$"},
    {"const": {"a": [1, "é\n"]}},
]


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("make", [byte_tokenizer, sentencepiece_tokenizer, smollm2_tokenizer])
def test_whatever_is_chosen_is_json_that_the_schema_allows(make: Any, schema: dict[str, Any]):
    tokenizer = make()
    chance = random.Random(7)
    ends = 0
    for _ in range(6):
        text, ended = wander(start(make, json_schema=schema), tokenizer, chance, 600)
        ends += ended
        if ended:
            jsonschema.validate(json.loads(text), schema)
    # Numbers may have any number of digits, all else is bounded.
    assert ends >= (3 if schema.get("type") == "array" else 6)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (None, ['{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}'], ['{"a":  1', "{\n", '{ "a"', " "]),
        ("", ['{"a":1,"b":[1,2]}'], ['{"a": 1']),
        ("[ \\n]{1,3}", ['{\n  "a": 1, "b":[ 1\n]}'], ["{    ", "{\n\n\n\n"]),
    ],
)
def test_blanks_in_json_are_bounded(pattern: str | None, good: list[str], bad: list[str]):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "maxItems": 2}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    schema["properties"]["b"]["items"] = {"type": "integer"}
    tokenizer = byte_tokenizer()
    for text, fits in [*((each, True) for each in good), *((each, False) for each in bad)]:
        matcher = start(json_schema=schema, whitespace_pattern=pattern)
        taken, is_whole = True, False
        for token in tokenizer.encode(text):
            if token not in allowed(matcher.mask()):
                taken = False
                break
            is_whole = matcher.advance(token)
        assert taken == fits, text
        if fits:
            assert is_whole
            json.loads(text)


def test_blanks_in_json_within_a_grammar_are_bounded_too():
    text = 'start: /[a"\\/]/ "%json {" %json {"type": "array", "items": {"const": 1}} // "%json {'
    matcher = start(grammar=text)
    for token in byte_tokenizer().encode('"%json {['):
        assert token in allowed(matcher.mask())
        assert not matcher.advance(token)
    assert set(allowed(matcher.mask())) == set(byte_tokenizer().encode("1]"))


def test_any_object_will_do_where_any_is_asked_for():
    assert allowed(start(json_object=True).mask()) == byte_tokenizer().encode("{")


def test_grammars_in_llama_cpps_notation_are_translated():
    matcher = start(grammar='root ::= "a" item+\nitem ::= "b" | "c"\n')
    assert allowed(matcher.mask()) == byte_tokenizer().encode("a")


# Behind a marker.


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="abxé", max_size=12), st.sampled_from(["ab", "aab", "abab", "é"]))
def test_the_grammar_begins_right_behind_the_first_marker(text: str, marker: str):
    tokenizer = byte_tokenizer()
    matcher = start(choice=("xx",), after=marker)
    for place, token in enumerate(tokenizer.encode(text + marker)):
        mask = allowed(matcher.mask())
        if marker.encode() in (text + marker).encode()[:place]:
            assert mask == tokenizer.encode("x")
            return
        assert token in mask
        assert not tokenizer.eos_token_ids & set(mask)
        assert not matcher.advance(token)
    assert allowed(matcher.mask()) == tokenizer.encode("x")


def test_no_token_runs_from_free_text_into_the_grammar():
    tokenizer = smollm2_tokenizer()
    matcher = start(smollm2_tokenizer, choice=("yes",), after="</think>")
    for token in tokenizer.encode("so</think"):
        assert token in allowed(matcher.mask())
        matcher.advance(token)
    mask = allowed(matcher.mask())
    closing = [token for token in mask if tokenizer.token_bytes(token).startswith(b">")]
    assert [tokenizer.token_bytes(token) for token in closing] == [b">"]
    matcher.advance(closing[0])
    assert {tokenizer.token_bytes(token) for token in allowed(matcher.mask())} <= {
        b"y",
        b"ye",
        b"yes",
    }


def test_a_special_token_can_be_the_marker():
    tokenizer = byte_tokenizer()
    mark = tokenizer.token_to_id("<|im_start|>")
    assert mark is not None
    matcher = start(choice=("x",), after="<|im_start|>")
    matcher.advance(mark)
    assert allowed(matcher.mask()) == tokenizer.encode("x")


# What is refused.


def wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": False},
        {"json_schema": {"type": "integer", "minimum": 5, "maximum": 1}},
        {"json_schema": {"enum": []}},
        {"json_schema": {"type": "strin"}},
        {"json_schema": {"type": "object", "properties": {"a": False}, "required": ["a"]}},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        {"json_schema": {"$ref": "#/nowhere"}},
        {"json_schema": {"$ref": "https://example.com/schema.json"}},
        {"json_schema": {"type": "array", "uniqueItems": True}},
        {"json_schema": {"not": {"type": "string"}}},
        {"json_schema": {"type": "string", "format": "no such"}},
        {"json_schema": {"type": "string", "pattern": "(a"}},
        {"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
        {"json_schema": {"type": "integer", "multipleOf": 123456789}},
        {"json_schema": {"allOf": [{"multipleOf": 499}, {"multipleOf": 503}]}},
        {"json_schema": {"type": "string", "minLength": 2**62}},
        {"json_schema": wide(4000)},
        {"json_schema": {"items": {"anyOf": [{}, wide(1001)]}}},
        {"json_schema": {"enum": [f"value {i} {'x' * 9}" for i in range(15000)]}},
        {"json_schema": {"type": "object", "x-guidance": {"no such": 1}}},
        {"regex": "(a"},
        {"regex": "(?=a)b"},
        {"regex": r"(a)\1"},
        {"regex": r"\bfoo\b"},
        {"regex": r"[^\s\S]"},
        {"regex": "(a{1000}){1000}"},
        {"regex": "((a{1000}){1000}){1000}"},
        {"regex": "(" * 2000 + "a" + ")" * 2000},
        {"grammar": ""},
        {"grammar": "x"},
        {"grammar": "start: missing"},
        {"grammar": "start: start"},
        {"grammar": 'start: "a" b\nb: b "c"'},
        {"grammar": "start: A\nA: /.*a.{300}/ & /.*b.{299}/ & ~/.*d.{297}/"},
        {"grammar": 'start: ("a"{1000}){100000}'},
        {"grammar": "start: %json {"},
        {"grammar": 'start: %json {"multipleOf": 99991}'},
        {"grammar": "start: %json " + '{"items":' * 150 + "{}" + "}" * 150},
        {"grammar": "start: <|no such token|>"},
        {"grammar": "root ::= ("},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_what_is_impossible_or_too_much_is_refused_by_its_field(fields: dict[str, Any]):
    with pytest.raises(InvalidRequestError) as caught:
        start(**fields)
    assert caught.value.field == next(iter(fields))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": {"type": "string", "pattern": "(a{1000}){1000}"}},
        {"json_schema": {"type": "string", "maxLength": 10**6}},
        {"json_schema": {"type": "array", "minItems": 10**5, "maxItems": 10**6}},
        {"json_schema": {"type": "integer", "maximum": 10**300}},
        {"json_schema": {"enum": [f"v{i}" for i in range(5000)]}},
        {"json_schema": wide(300)},
        {"json_schema": {"allOf": [{"anyOf": [{"const": i}, wide(2)]} for i in range(40)]}},
        {"json_schema": {"allOf": [{"pattern": f"{c}.{{50}}$"} for c in "abcd"]}},
        {"regex": "(.*a.{20}.*b.{20}.*){20}"},
        {"regex": "(a|a)*(a|a)*(a|a)*b"},
        {"grammar": 'start: s\ns: s s | "a" | "b" s |'},
        {"grammar": 'start: "a" start "b" start | "c"'},
        {"choice": tuple(f"option {i}" for i in range(4000))},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_what_looks_like_much_work_is_done_or_refused_but_never_hangs(fields: dict[str, Any]):
    with suppress(InvalidRequestError, NoTokenLeftError):
        wander(start(**fields), byte_tokenizer(), random.Random(1), 60)


def test_a_tokenizer_whose_text_is_not_its_tokens_joined_is_refused():
    with pytest.raises(InvalidRequestError, match="tokens joined"):
        start(wordpiece_tokenizer, regex="a")


# What is kept.


def counting(monkeypatch: pytest.MonkeyPatch) -> tuple[LLGuidance, list[StructuredOutputs]]:
    tokens = [b"a", b"b", b"</s>"]
    vocabulary = Vocabulary(tokens, frozenset({2}), frozenset({2}), encode=lambda _: [])
    compiled: list[StructuredOutputs] = []
    compile_ = LLGuidance._compile

    def note(self: LLGuidance, structured: StructuredOutputs) -> Any:
        compiled.append(structured)
        return compile_(self, structured)

    monkeypatch.setattr(LLGuidance, "_compile", note)
    return LLGuidance(lambda: vocabulary), compiled


def test_a_grammar_is_compiled_once_until_too_many_others_came(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_module, "MAX_GRAMMARS", 2)
    guide, compiled = counting(monkeypatch)
    specs = [StructuredOutputs(regex=each) for each in ("a", "b", "ab")]
    for index in (0, 1, 0, 2, 0, 1):
        guide.compile(specs[index])
    assert compiled == [specs[0], specs[1], specs[2], specs[1]]
    assert len(guide._kept) == 2


def test_what_is_kept_is_bounded_by_its_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_module, "MAX_KEPT_CHARS", 10)
    guide, _ = counting(monkeypatch)
    for regex in ("a", "aaaaaa", "bbbbb", "aaaaaaaaaaaaaaaaaa"):
        guide.compile(StructuredOutputs(regex=regex))
    assert list(guide._kept) == []
    guide.compile(StructuredOutputs(regex="aa"))
    assert len(guide._kept) == 1


def test_many_at_once_compile_it_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_module, "MAX_COMPILING", 1)
    guide, compiled = counting(monkeypatch)
    spec = StructuredOutputs(regex="ab")
    threads = [threading.Thread(target=guide.compile, args=(spec,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [spec]


def test_a_compiler_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 0.01)
    guide, _ = counting(monkeypatch)
    gate = threading.Event()
    monkeypatch.setattr(LLGuidance, "_compile", lambda *_: gate.wait(60))
    try:
        with pytest.raises(InvalidRequestError, match="seconds to compile"):
            guide.compile(StructuredOutputs(regex="a"))
    finally:
        gate.set()


def test_a_compiler_that_fails_in_some_way_of_its_own_is_an_error_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
):
    class Panic(BaseException):
        pass

    def fail(*_: Any) -> Any:
        raise Panic("index out of bounds")

    guide, _ = counting(monkeypatch)
    monkeypatch.setattr(LLGuidance, "_compile", fail)
    with pytest.raises(InvalidRequestError, match="index out of bounds"):
        guide.compile(StructuredOutputs(regex="a"))
