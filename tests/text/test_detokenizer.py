"""Detokenizer: whole characters, exact stops, the same text however the tokens arrive."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.text.detokenizer import Detokenizer
from pagedmlx.text.tokenizer import Tokenizer
from tests.support.texts import cut_at_stop, pieces
from tests.support.tokenizers import (
    SPECIAL_TOKENS,
    byte_ids,
    byte_tokenizer,
    metaspace_tokenizer,
    sentencepiece_tokenizer,
    smollm2_tokenizer,
    wordpiece_tokenizer,
)

BYTE = byte_tokenizer()
MIXED = "né 🙂👩‍👩‍👧 漢字"
EXACT = [byte_tokenizer, sentencepiece_tokenizer, smollm2_tokenizer]
ANY = [*EXACT, metaspace_tokenizer, wordpiece_tokenizer]
make_any = pytest.mark.parametrize("make", ANY, ids=lambda make: make.__name__)


def run(
    tokenizer: Tokenizer, groups: list[list[int]], params: SamplingParams, **options: list[int]
) -> tuple[str, str | None, list[str]]:
    detokenizer = Detokenizer(tokenizer, params, **options)
    deltas = [detokenizer.add(group) for group in groups]
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == detokenizer.text
    return detokenizer.text, detokenizer.stop_reason, deltas


def one_by_one(ids: list[int]) -> list[list[int]]:
    return [[token] for token in ids]


def text_of(data: bytes) -> str:
    """Specification for any bytes: decoded as UTF-8, without a tail that begins a character."""
    for size in (1, 2, 3):
        try:
            data[-size:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return data[:-size].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


@make_any
@given(data=st.data())
def test_any_grouping_gives_the_same_text_and_stop(make: Callable[[], Tokenizer], data):
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, min(tokenizer.vocab_size, 300) - 1), max_size=40))
    params = SamplingParams(
        max_tokens=64,
        stop=tuple(data.draw(st.lists(st.sampled_from(["a", "ab", "the", " f", "�", "é"])))),
        min_tokens=data.draw(st.integers(0, 10)),
        skip_special_tokens=data.draw(st.booleans()),
    )
    first = run(tokenizer, one_by_one(ids), params)[:2]
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=6))
    assert run(tokenizer, pieces(ids, cuts), params)[:2] == first
    assert run(tokenizer, [ids], params)[:2] == first


@pytest.mark.parametrize("make", [byte_tokenizer, smollm2_tokenizer], ids=["byte", "smollm2"])
@given(data=st.data())
def test_byte_level_text_is_the_whole_decode_cut_at_the_first_stop(make, data):
    tokenizer = make()
    size = tokenizer.vocab_size
    token = st.one_of(st.integers(0, min(size, 300) - 1), st.integers(0, size - 1))
    ids = data.draw(st.lists(token, max_size=40))
    skip = data.draw(st.booleans())
    stops = data.draw(st.lists(st.sampled_from(["a", "bc", "the", "!", " ", "é"]), max_size=3))
    params = SamplingParams(stop=tuple(stops), skip_special_tokens=skip)
    text, stop, _ = run(tokenizer, one_by_one(ids), params)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    # A tail that could have become a character is one U+FFFD in the decode and nothing here.
    expected = {cut_at_stop(whole, stops), cut_at_stop(whole.removesuffix("�"), stops)}
    assert (text, stop) in expected


@example(b"a\xed\xa0", "")
@given(st.binary(max_size=30), st.sampled_from(["", "a", "é", "\x80"]))
def test_any_bytes_are_decoded_and_cut_at_the_first_stop(data, stop):
    expected = cut_at_stop(text_of(data), [stop] if stop else [])
    sentencepiece = sentencepiece_tokenizer()
    first_byte = sentencepiece.token_to_id("<0x00>")
    params = SamplingParams(stop=stop)
    assert run(BYTE, one_by_one(byte_ids(data)), params)[:2] == expected
    if not data.startswith(b" "):
        ids = [first_byte + byte for byte in data]
        assert run(sentencepiece, one_by_one(ids), params)[:2] == expected


@make_any
@given(data=st.data())
def test_whole_text_is_the_tokenizers_own_decode(make, data):
    tokenizer = make()
    usable = [
        token
        for token in range(min(tokenizer.vocab_size, 600))
        if "�" not in tokenizer.decode([token], skip_special_tokens=False)
    ]
    ids = data.draw(st.lists(st.sampled_from(usable), max_size=200))
    skip = data.draw(st.booleans())
    params = SamplingParams(skip_special_tokens=skip)
    text, _, _ = run(tokenizer, one_by_one(ids), params)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("make", EXACT, ids=lambda make: make.__name__)
@given(
    text=st.text(st.characters(max_codepoint=0x2FFFF, codec="utf-8"), max_size=60),
    end=st.integers(0, 200),
)
def test_real_text_cut_anywhere_never_shows_a_broken_character(make, text, end):
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)[:end]
    shown, _, deltas = run(tokenizer, one_by_one(ids), SamplingParams())
    if "�" not in text:
        assert not any("�" in delta for delta in deltas)
        plain = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        assert plain.startswith(shown)
    assert shown == run(tokenizer, [ids], SamplingParams())[0]


@pytest.mark.parametrize("make", EXACT, ids=lambda make: make.__name__)
def test_emoji_and_kanji_come_whole(make):
    tokenizer = make()
    ids = tokenizer.encode(MIXED, add_special_tokens=False)
    text, _, deltas = run(tokenizer, one_by_one(ids), SamplingParams())
    assert text == MIXED
    assert len([delta for delta in deltas if delta]) > 3
    assert not any("�" in delta for delta in deltas)


@pytest.mark.parametrize("make", EXACT, ids=lambda make: make.__name__)
def test_a_character_cut_by_the_end_is_dropped_in_both_modes(make):
    tokenizer = make()
    ids = tokenizer.encode("ok 🙂", add_special_tokens=False)[:-1]
    assert run(tokenizer, one_by_one(ids), SamplingParams())[0].rstrip() == "ok"
    assert run(tokenizer, [ids], SamplingParams())[0].rstrip() == "ok"


def test_bytes_that_can_be_no_character_are_replaced_once_that_is_certain():
    ids = byte_ids(b"a\xe3\x81b\xffc\xe3")
    assert run(BYTE, one_by_one(ids), SamplingParams())[0] == "a�b�c"


@pytest.mark.parametrize("text", [" the", "  the", "   ", "the  fox ", "a  the"])
@pytest.mark.parametrize("make", EXACT, ids=lambda make: make.__name__)
def test_spaces_are_those_of_the_decode(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert run(tokenizer, one_by_one(ids), SamplingParams())[0] == text == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [sentencepiece_tokenizer, metaspace_tokenizer])
def test_a_completion_keeps_the_space_between_prompt_and_text(make):
    tokenizer = make()
    prompt = [tokenizer.token_to_id(token) for token in ("<s>", "▁the")]
    ids = [tokenizer.token_to_id("▁fox"), tokenizer.token_to_id("▁a")]
    alone = run(tokenizer, one_by_one(ids), SamplingParams())[0]
    assert alone == "fox a"
    assert run(tokenizer, [ids], SamplingParams(), prompt_token_ids=prompt)[0] == " fox a"
    only_bos = prompt[:1]
    assert run(tokenizer, [ids], SamplingParams(), prompt_token_ids=only_bos)[0] == "fox a"


def test_byte_level_text_does_not_depend_on_the_prompt():
    ids = BYTE.encode(" the fox")
    prompt = BYTE.encode("see")
    assert run(BYTE, [ids], SamplingParams(), prompt_token_ids=prompt)[0] == " the fox"


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.parametrize("make", ANY, ids=lambda make: make.__name__)
def test_short_answers_arrive_whole(make, num_tokens):
    tokenizer = make()
    ids = [tokenizer.token_to_id("the") or tokenizer.encode("the")[-1]] * num_tokens
    text = run(tokenizer, one_by_one(ids), SamplingParams(stop=("them",)))[0]
    assert text == tokenizer.decode(ids)
    assert text.endswith("the")


def test_stop_over_token_borders_ends_the_text_right_before_it():
    ids = BYTE.encode("the brown fox jumps")
    detokenizer = Detokenizer(BYTE, SamplingParams(stop="own fox"))
    shown = [detokenizer.add([token]) for token in ids]
    assert "".join(shown) == detokenizer.text == "the br"
    assert detokenizer.stop_reason == "own fox"
    assert detokenizer.num_tokens == len(BYTE.encode("the brown fox"))
    assert detokenizer.finish() == ""
    assert detokenizer.text == "the br"


def test_nothing_after_a_stop_when_many_tokens_arrive_at_once():
    detokenizer = Detokenizer(BYTE, SamplingParams(stop=["STOP"]))
    assert detokenizer.add(BYTE.encode("go STOP on and on")) == "go "
    assert detokenizer.num_tokens == len(BYTE.encode("go STOP"))
    assert detokenizer.add(BYTE.encode("more")) == ""
    assert detokenizer.finish() == ""


def test_an_output_that_ends_in_part_of_a_stop_string_shows_it_at_the_end():
    detokenizer = Detokenizer(BYTE, SamplingParams(stop=["</answer>"]))
    assert detokenizer.add(BYTE.encode("yes</ans")) == "yes"
    assert detokenizer.finish() == "</ans"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("stop", ["", [""], [], None])
def test_empty_stop_strings_stop_nothing(stop):
    assert run(BYTE, [BYTE.encode("abc")], SamplingParams(stop=stop))[:2] == ("abc", None)


def test_stop_strings_wait_for_min_tokens():
    ids = BYTE.encode("x.y.z.")
    params = SamplingParams(stop=".", min_tokens=3)
    assert run(BYTE, one_by_one(ids), params)[:2] == ("x.y", ".")
    assert run(BYTE, [ids], params)[:2] == ("x.y", ".")
    at_edge = SamplingParams(stop=".", min_tokens=2)
    assert run(BYTE, [ids], at_edge)[:2] == ("x", ".")


def test_special_tokens_are_text_only_when_asked_for():
    end = SPECIAL_TOKENS.index("<|im_end|>")
    ids = [*BYTE.encode("a"), end, *BYTE.encode("b")]
    assert run(BYTE, [ids], SamplingParams())[0] == "ab"
    shown = run(BYTE, [ids], SamplingParams(skip_special_tokens=False))[0]
    assert shown == "a<|im_end|>b"


@make_any
def test_ids_outside_the_vocabulary_are_no_text(make):
    tokenizer = make()
    ids = [tokenizer.vocab_size + 7, *tokenizer.encode("the", add_special_tokens=False)]
    assert run(tokenizer, one_by_one(ids), SamplingParams())[0] == tokenizer.decode(ids)


def test_a_long_output_is_not_decoded_again_and_again(monkeypatch):
    tokenizer = metaspace_tokenizer()
    longest = 0
    decode = Tokenizer.decode

    def watched(self, ids, **options):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", watched)
    ids = random.Random(0).choices(range(5, tokenizer.vocab_size), k=2000)
    text = run(tokenizer, one_by_one(ids), SamplingParams())[0]
    assert longest < 100
    assert text == tokenizer.decode(ids)
