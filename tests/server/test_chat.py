from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.engines import FakeRunner, make_engine, spelled
from tests.support.server import MODEL, RunningServer, serving


def contents(events: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            text = choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def test_a_whole_answer_has_openais_shape(server: RunningServer):
    answer = server.chat(max_tokens=5, temperature=0)
    assert answer.status == 200
    body = answer.json
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 5
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    usage = body["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_what_the_whole_answer_says(server: RunningServer, n: int):
    fields = {"max_tokens": 20, "seed": 7, "n": n, "temperature": 1.0}
    whole = server.chat("tell", **fields).json["choices"]
    answer = server.chat("tell", **fields, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.events
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    assert contents(events) == {c["index"]: c["message"]["content"] for c in whole}
    ends = [c for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert sorted(c["index"] for c in ends) == list(range(n))
    first = events[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": "", "refusal": None}


@pytest.mark.parametrize(
    ("options", "has_usage"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ],
)
def test_a_stream_tells_tokens_once_and_only_if_asked(
    server: RunningServer, options: Any, has_usage: bool
):
    events = server.chat("count", max_tokens=4, n=2, stream=True, stream_options=options).events
    told = [event for event in events[:-1] if event.get("usage")]
    assert len(told) == has_usage
    if has_usage:
        assert events[-2] is told[0]
        assert told[0]["choices"] == []
        whole = server.chat("count", max_tokens=4, n=2).json["usage"]
        assert told[0]["usage"]["total_tokens"] == whole["total_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_not_in_it(stream: bool):
    runner = FakeRunner(spelled("the quick brown fox jumps"))
    with serving(lambda: make_engine(runner)) as server:
        answer = server.chat(stop=["own fo", "zzz"], stream=stream)
        if stream:
            text = contents(answer.events)[0]
            ends = [c for e in answer.events[:-1] for c in e["choices"] if c["finish_reason"]]
        else:
            ends = answer.json["choices"]
            text = ends[0]["message"]["content"]
        assert text == "the quick br"
        assert (ends[0]["finish_reason"], ends[0]["stop_reason"]) == ("stop", "own fo")


@pytest.mark.parametrize("stream", [False, True])
def test_text_is_never_half_a_character(stream: bool):
    text = "né 🙂👩‍👩‍👧 漢字"
    with serving(lambda: make_engine(FakeRunner(spelled(text)))) as server:
        answer = server.chat(max_tokens=100, stream=stream)
        if stream:
            assert contents(answer.events)[0] == text
            assert "\ufffd" not in answer.body.decode()
        else:
            assert answer.json["choices"][0]["message"]["content"] == text


def test_log_probabilities_are_those_of_the_text_in_both_modes():
    runner = FakeRunner(spelled("ab 🙂 stop here"))
    with serving(lambda: make_engine(runner)) as server:
        fields = {"logprobs": True, "top_logprobs": 2, "stop": "stop"}
        whole = server.chat(**fields).json["choices"][0]
        tokens = whole["logprobs"]["content"]
        assert b"".join(bytes(t["bytes"]) for t in tokens).decode() == "ab 🙂 "
        assert all(len(t["top_logprobs"]) == 2 for t in tokens)
        assert all(math.isfinite(t["logprob"]) for t in tokens)
        streamed = [
            token
            for event in server.chat(**fields, stream=True).events[:-1]
            for choice in event["choices"]
            if choice["logprobs"]
            for token in choice["logprobs"]["content"]
        ]
        assert streamed == tokens


def test_the_log_probabilities_of_a_prompt_can_be_asked_for(server: RunningServer):
    body = server.chat("hi", max_tokens=1, prompt_logprobs=1).json
    told = body["prompt_logprobs"]
    assert len(told) == body["usage"]["prompt_tokens"]
    assert told[0] is None
    assert all("logprob" in next(iter(each.values())) for each in told[1:])
    refused = server.chat("hi", prompt_logprobs=1, stream=True)
    assert (refused.status, refused.error["param"]) == (400, "prompt_logprobs")


def test_seeds_repeat_and_candidates_differ(server: RunningServer):
    fields = {"max_tokens": 30, "n": 4, "seed": 3}
    first, second = (
        [c["message"]["content"] for c in server.chat("x", **fields).json["choices"]]
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 4


def test_a_second_turn_comes_from_the_cache_unless_its_salt_differs(server: RunningServer):
    messages = [{"role": "user", "content": "a long enough story about cached blocks"}]
    fields = {"messages": messages, "max_tokens": 2, "cache_salt": "mine"}
    cached = []
    for salt in ("mine", "mine", "yours"):
        body = server.post("/v1/chat/completions", {**fields, "cache_salt": salt}).json
        cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


def test_null_is_the_same_as_absent_in_every_field(server: RunningServer):
    from pagedmlx.server.fields import CHAT_FIELDS

    nulls = {field.name: None for field in CHAT_FIELDS if field.name != "messages"}
    answer = server.post(
        "/v1/chat/completions",
        {**nulls, "messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 3},
    )
    assert answer.status == 200
    assert answer.json["usage"]["completion_tokens"] == 3


def test_content_may_be_parts_and_an_answer_without_limit_fills_the_context(
    server: RunningServer,
):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    one, other = (server.chat(c, temperature=0).json for c in (parts, "ab"))
    assert one["choices"] == other["choices"]
    assert one["usage"]["total_tokens"] == 512
    assert one["choices"][0]["finish_reason"] == "length"


def test_a_model_without_chat_template_is_told_before_a_stream_begins():
    from tests.support.tokenizers import byte_tokenizer

    with serving(lambda: make_engine(tokenizer=byte_tokenizer(chat_template=None))) as server:
        answer = server.chat(stream=True)
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "no chat template" in answer.error["message"]
        assert server.complete(max_tokens=1).status == 200
