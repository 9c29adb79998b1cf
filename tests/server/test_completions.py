from __future__ import annotations

from typing import Any

import pytest

from tests.support.engines import FakeRunner, make_engine, spelled
from tests.support.server import RunningServer, serving
from tests.support.tokenizers import byte_ids, byte_tokenizer

IDS = byte_ids(b"hello")


def texts(answer: Any) -> dict[int, str]:
    return {choice["index"]: choice["text"] for choice in answer.json["choices"]}


def streamed(events: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("hello", 1), (["hello", "you"], 2), (IDS, 1), ([IDS, IDS[:2]], 2)],
)
@pytest.mark.parametrize("n", [1, 2])
def test_prompts_are_text_ids_or_lists_of_them(
    server: RunningServer, prompt: Any, count: int, n: int
):
    fields = {"max_tokens": 6, "n": n, "seed": 1}
    whole = server.complete(prompt, **fields)
    assert whole.status == 200
    assert sorted(texts(whole)) == list(range(count * n))
    alone = [prompt] if count == 1 else prompt
    for place, each in enumerate(alone):
        solo = texts(server.complete(each, **fields))
        assert [texts(whole)[place * n + i] for i in range(n)] == [solo[i] for i in range(n)]
    events = server.complete(prompt, **fields, stream=True).events
    assert streamed(events) == texts(whole)
    assert events.count("[DONE]") == 1


def test_text_and_its_ids_are_the_same_prompt(server: RunningServer):
    assert texts(server.complete("hello", temperature=0)) == texts(
        server.complete(IDS, temperature=0)
    )


@pytest.mark.parametrize(
    "prompt",
    [[], "", [1, "a"], ["a", [1]], [[1], 2], [10**6], [-1], [10**30], [True], [[]], 5, {}, [None]],
)
def test_other_prompts_are_refused_by_name(server: RunningServer, prompt: Any):
    answer = server.complete(prompt, stream=True)
    assert (answer.status, answer.error["param"]) == (400, "prompt")


def test_the_default_length_is_openais(server: RunningServer):
    assert server.complete().json["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello", IDS])
def test_echo_begins_with_the_prompt_and_tells_of_its_tokens(stream: bool, prompt: Any):
    def build() -> Any:
        runner = FakeRunner(spelled(" you"))
        return make_engine(runner, tokenizer=byte_tokenizer(adds_bos=True))

    with serving(build) as server:
        answer = server.complete(prompt, echo=True, logprobs=1, n=2, stream=stream)
        if stream:
            choices = [c for e in answer.events[:-1] for c in e["choices"] if c["index"] == 1]
            text = "".join(c["text"] for c in choices)
            told = [c["logprobs"] for c in choices if c["logprobs"]]
            tokens, offsets, numbers = (
                [each for one in told for each in one[key]]
                for key in ("tokens", "text_offset", "token_logprobs")
            )
        else:
            choice = answer.json["choices"][1]
            text = choice["text"]
            tokens, offsets, numbers = (
                choice["logprobs"][key] for key in ("tokens", "text_offset", "token_logprobs")
            )
        assert text == "hello you"
        visible = [each for each in tokens if each != "<s>"]
        assert "".join(visible) == text
        assert offsets[-len(text) :] == list(range(len(text)))
        assert numbers[0] is None
        assert None not in numbers[1:]


def test_too_many_prompts_or_answers_are_refused(server: RunningServer):
    assert server.complete(["a"] * 129).error["param"] == "prompt"
    assert server.complete(["a"] * 128, n=64).error["param"] == "n"


def test_a_prompt_that_can_never_fit_stops_the_whole_list():
    with serving(lambda: make_engine(num_blocks=8)) as server:
        answer = server.complete(["a", "b" * 100], max_tokens=2, stream=True)
        assert (answer.status, answer.error["code"]) == (400, "pool_too_small")
        server.assert_idle()
