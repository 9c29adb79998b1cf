"""Log probabilities line up with tokens and text, streaming or not, whatever cuts the text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.engine.logprobs import LogprobWriter
from pagedmlx.engine.outputs import CompletionOutput, Job, OutputEvent, shown_logprobs
from pagedmlx.text.tokenizer import Tokenizer
from tests.support.engines import (
    EOS,
    LETTERS,
    FakeRunner,
    assert_idle,
    events_of,
    fake_logprobs,
    make_engine,
    run_job,
    spelled,
)
from tests.support.tokenizers import (
    byte_ids,
    byte_tokenizer,
    sentencepiece_tokenizer,
    smollm2_tokenizer,
    wordpiece_tokenizer,
)

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)
FACE = "\N{SLIGHTLY SMILING FACE}"


def answer(text: str | bytes, **params: object) -> tuple[CompletionOutput, list[OutputEvent]]:
    """What an engine that spells ``text`` answers, and the events that it comes in."""
    job = Job(prompt="hello", sampling_params=replace(PARAMS, **params))  # type: ignore[arg-type]
    output = run_job(make_engine(FakeRunner(spelled(text))), job)
    engine = make_engine(FakeRunner(spelled(text)))
    engine.add_request(job)
    events = events_of(engine)
    assert_idle(engine)
    return output.outputs[0], events


def streamed(events: list[OutputEvent]) -> tuple[str, bytes]:
    """Text and bytes as a front end sends them: each entry once its text is there."""
    text, data, pending = "", b"", []
    for event in events:
        assert event.logprobs is not None
        assert [entry.token.token_id for entry in event.logprobs] == list(event.token_ids)
        text += event.text
        pending += event.logprobs
        shown = shown_logprobs(pending, len(text), is_whole=event.finish_reason is not None)
        data += b"".join(entry.token.bytes for entry in shown)
        pending = [entry for entry in pending if entry not in shown]
    return text, data


@pytest.mark.usefixtures("depth")
@pytest.mark.parametrize(
    ("text", "params", "shown"),
    [
        ("abc", {}, "abc"),
        (f"n\N{LATIN SMALL LETTER E WITH ACUTE} {FACE}!", {}, None),
        (f"a{FACE}b", {"stop": ("b",)}, f"a{FACE}"),
        (f"a{FACE}b", {"stop": (FACE,)}, "a"),
        (f"a{FACE}b", {"stop": (FACE,), "include_stop_str_in_output": True}, f"a{FACE}"),
        ("one fox", {"stop": ("fox",)}, "one "),
        ("one fo", {"stop": ("fox",)}, "one fo"),
        (f"a{FACE}", {"max_tokens": 3}, "a"),
        (FACE, {"max_tokens": 2}, ""),
        ("ab", {"stop_token_ids": (byte_ids(b"b")[0],)}, "a"),
        ("ab", {"stop_token_ids": (byte_ids(b"b")[0],), "include_stop_str_in_output": True}, "ab"),
        ("ab", {"ignore_eos": True, "max_tokens": 5}, "ab"),
        ("", {}, ""),
    ],
)
def test_shown_entries_spell_the_text(text: str, params: dict[str, object], shown: str | None):
    output, events = answer(text, **params)
    shown = text if shown is None else shown
    assert output.text == shown
    assert b"".join(entry.token.bytes for entry in output.shown_logprobs).decode() == shown
    assert streamed(events) == (shown, shown.encode())
    assert output.logprobs is not None
    assert [entry.token.token_id for entry in output.logprobs] == list(output.token_ids)


def test_a_token_that_is_left_out_of_the_text_still_has_its_name():
    output, _ = answer("a")
    assert output.logprobs is not None
    (entry,) = output.logprobs[1:]
    assert (entry.token.token_id, entry.token.text, entry.token.bytes) == (EOS, "</s>", b"</s>")
    assert (entry.start, entry.end) == (1, 1)
    kept, _ = answer("a", include_stop_str_in_output=True, skip_special_tokens=False)
    assert kept.text == "a</s>"
    assert kept.shown_logprobs == kept.logprobs


def test_alternatives_come_with_rank_text_and_bytes():
    output, _ = answer("z", logprobs=3)
    assert output.logprobs is not None
    top = output.logprobs[0].top
    assert [(each.text, each.bytes, each.rank, each.logprob) for each in top] == [
        ("z", b"z", 1, -1.0),
        ("a", b"a", 2, -2.0),
        ("b", b"b", 3, -3.0),
    ]
    none, _ = answer("z", logprobs=0)
    assert none.logprobs is not None
    assert none.logprobs[0].top == ()
    unasked, events = answer("z", logprobs=None)
    assert unasked.logprobs is None
    assert all(event.logprobs is None for event in events)


def test_part_of_a_character_is_its_bytes_and_no_text():
    output, _ = answer(FACE)
    assert output.logprobs is not None
    assert [entry.token.bytes for entry in output.logprobs[:4]] == [
        bytes([byte]) for byte in FACE.encode()
    ]
    assert output.logprobs[0].token.text == "\N{REPLACEMENT CHARACTER}"
    assert [(entry.start, entry.end) for entry in output.logprobs] == [(0, 1)] * 4 + [(1, 1)]


@pytest.mark.usefixtures("depth")
@pytest.mark.parametrize("chunk", [3, 8])
def test_a_prompts_entries_come_once_with_the_first_token(chunk: int):
    engine = make_engine(prefill_chunk_size=chunk)
    params = replace(PARAMS, prompt_logprobs=1, n=2, logprobs=None)
    for _ in range(2):
        engine.add_request(Job(prompt=f"hi {FACE}xyz", sampling_params=params))
        events = events_of(engine)
        told = [event for event in events if event.prompt_logprobs is not None]
        assert told == [next(event for event in events if event.index == 0)]
        prompt = told[0].prompt_logprobs
        assert prompt is not None
        assert prompt[0] is None
        data = b"".join(entry.token.bytes for entry in prompt[1:] if entry is not None)
        assert b"h" + data == f"hi {FACE}xyz".encode()
        ends = [entry.end for entry in prompt if entry is not None]
        assert ends == [2, 3, 4, 4, 4, 4, 5, 6, 7]
        assert told[0].num_cached_tokens == 0
    assert_idle(engine)


def test_a_prompt_of_one_token_has_nothing_to_tell():
    params = replace(PARAMS, prompt_logprobs=1)
    output = run_job(make_engine(), Job(prompt="a", sampling_params=params))
    assert output.prompt_logprobs == (None,)


def test_an_output_that_ends_before_its_first_token_has_no_entries():
    engine = make_engine()
    name = engine.add_request(Job(prompt="a", sampling_params=replace(PARAMS, prompt_logprobs=1)))
    (event,) = engine.abort(name)
    assert event.logprobs == ()
    assert event.prompt_logprobs is None


def writer_spells(tokenizer: Tokenizer, ids: list[int], context: list[int]) -> tuple[bytes, str]:
    writer = LogprobWriter(tokenizer, skip_special_tokens=True, context=context)
    entries = [writer.write(fake_logprobs(token, 0)) for token in ids]
    stream = tokenizer.token_stream(context=context)
    text = "".join(map(stream.push, ids)) + stream.flush()
    shown = shown_logprobs(entries, len(text), is_whole=True)
    return b"".join(entry.token.bytes for entry in shown), text


@given(data=st.data(), in_context=st.booleans())
def test_bytes_join_to_the_text_for_every_byte_tokenizer(data: st.DataObject, in_context: bool):
    tokenizer = data.draw(
        st.sampled_from([byte_tokenizer(), sentencepiece_tokenizer(), smollm2_tokenizer()])
    )
    text = data.draw(st.text(max_size=12))
    ids = tokenizer.encode(text, add_special_tokens=False)
    context = tokenizer.encode("so", add_special_tokens=False) if in_context else []
    joined, shown = writer_spells(tokenizer, ids, context)
    # Bytes that the vocabulary lacks are left out, so that the text may have broken characters.
    assert joined.decode(errors="replace") == shown


def test_other_tokenizers_tell_what_a_token_adds_within_a_text():
    tokenizer = wordpiece_tokenizer()
    ids = [tokenizer.token_to_id(token) for token in ("the", "fox", "##es")]
    assert [tokenizer.token_bytes(each) for each in ids if each] == [b" the", b" fox", b"es"]


def test_letters_of_other_texts_are_not_mixed_up():
    engine = make_engine()
    jobs = [Job(prompt="x" * n, sampling_params=replace(PARAMS, max_tokens=n)) for n in (1, 4, 9)]
    names = [engine.add_request(job) for job in jobs]
    events = events_of(engine)
    for name in names:
        mine = [event for event in events if event.request_id == name]
        text, data = streamed(mine)
        assert data.decode() == text
        assert {token for event in mine for token in event.token_ids} <= set(LETTERS)
