"""Any OpenAI endpoint will do, and one that misbehaves is named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from pagedmlx.chat.client import ChatRequest, Delta
from pagedmlx.chat.http_client import EndpointError, HttpClient
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.snapshot import EngineSnapshot

Handler = Callable[[httpx.Request], httpx.Response]

MODELS = {"data": [{"id": "first", "max_model_len": 512}, {"id": "second"}]}


def events(*values: object, end: bool = True) -> bytes:
    lines = [f"data: {json.dumps(value)}\n\n" for value in values]
    return "".join([": keep-alive\n\n", *lines, "data: [DONE]\n\n" * end]).encode()


def chunk(index: int = 0, finish: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


def client(handler: Handler, url: str = "http://host", **options: str) -> HttpClient:
    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json=MODELS)
        return handler(request)

    return HttpClient(url, transport=httpx.MockTransport(respond), **options)


def ask(
    made: HttpClient, params: SamplingParams | None = None, messages: Any = None
) -> list[Delta]:
    async def run() -> list[Delta]:
        await made.start(lambda _what, _share: None)
        request = ChatRequest(
            "r", messages or [{"role": "user", "content": "Hi"}], params or SamplingParams()
        )
        try:
            return [delta async for delta in made.answer(request)]
        finally:
            assert await made.close()

    return asyncio.run(run())


def body_of(params: SamplingParams, messages: Any = None) -> dict[str, Any]:
    bodies: list[dict[str, Any]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, content=events(chunk(finish="stop")))

    with_n = params.n
    if with_n > 1:

        def respond_n(request: httpx.Request) -> httpx.Response:
            bodies.append(json.loads(request.content))
            ends = [chunk(index, "stop") for index in range(with_n)]
            return httpx.Response(200, content=events(*ends))

        ask(client(respond_n), params, messages)
    else:
        ask(client(respond), params, messages)
    return bodies[0]


def test_an_answer_streams_and_the_usage_is_told() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    content = events(
        chunk(role="assistant", content=""),
        chunk(content="Hel"),
        chunk(content="lo"),
        chunk(finish="length"),
        {"choices": [], "usage": usage},
    )
    deltas = ask(client(lambda _: httpx.Response(200, content=content)))
    assert "".join(each.text for each in deltas) == "Hello"
    assert [each.finish for each in deltas if each.finish] == ["length"]
    last = deltas[-1]
    assert (last.num_prompt_tokens, last.num_cached_tokens, last.num_output_tokens) == (9, 8, 5)
    assert deltas[1].ttft_s is not None


def test_reasoning_in_a_field_of_its_own_comes_between_tags() -> None:
    content = events(
        chunk(reasoning_content="hm"),
        chunk(reasoning_content=", so"),
        chunk(content="Yes"),
        chunk(finish="stop"),
    )
    deltas = ask(client(lambda _: httpx.Response(200, content=content)))
    assert "".join(each.text for each in deltas) == "<think>\nhm, so\n</think>\n\nYes"


def test_candidates_are_told_apart() -> None:
    content = events(
        chunk(0, content="a"),
        chunk(1, content="b"),
        chunk(1, "stop"),
        chunk(0, "stop"),
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}},
    )
    deltas = ask(client(lambda _: httpx.Response(200, content=content)), SamplingParams(n=2))
    assert [(each.index, each.text) for each in deltas if each.text] == [(0, "a"), (1, "b")]
    assert (deltas[-1].num_prompt_tokens, deltas[-1].num_output_tokens) == (9, None)


def test_only_settings_that_are_set_go_beyond_the_standard() -> None:
    body = body_of(SamplingParams(temperature=0.5, max_tokens=None))
    assert body["model"] == "first"
    assert body["stream_options"] == {"include_usage": True}
    assert body["temperature"] == 0.5
    assert not {"top_k", "min_p", "repetition_penalty", "n", "max_tokens", "seed"} & body.keys()
    body = body_of(SamplingParams(top_k=4, min_p=0.1, n=2, stop=("END",), seed=1))
    assert (body["top_k"], body["min_p"], body["n"]) == (4, 0.1, 2)
    assert (body["stop"], body["seed"]) == (["END"], 1)


def test_reasoning_is_not_sent_back() -> None:
    messages = [
        {"role": "user", "content": "<think>mine</think>"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"},
        {"role": "user", "content": "Why?"},
    ]
    sent = body_of(SamplingParams(), messages)["messages"]
    assert [each["content"] for each in sent] == ["<think>mine</think>", "Yes", "Why?"]


@pytest.mark.parametrize(
    "url", ["http://host", "host", "http://host/v1", "http://host/v1/", "host/"]
)
def test_an_address_may_be_written_in_any_way(url: str) -> None:
    paths: list[str] = []

    def respond(request: httpx.Request) -> httpx.Response:
        paths.append(str(request.url))
        return httpx.Response(200, content=events(chunk(finish="stop")))

    ask(client(respond, url))
    assert paths == ["http://host/v1/chat/completions"]


def test_the_first_model_is_taken_unless_one_is_named_and_the_key_is_sent() -> None:
    seen: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=events(chunk(finish="stop")))

    made = client(respond)
    ask(made)
    assert (made.name, made.max_len) == ("first", 512)
    ask(client(respond, model="second", api_key="secret"))
    assert json.loads(seen[1].content)["model"] == "second"
    assert seen[1].headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (httpx.Response(401, json={"error": {"message": "no key"}}), "refuses with 401: no key"),
        (httpx.Response(500, text="<html>"), "refuses with 500: <html>"),
        (httpx.Response(200, content=b"data: {oops\n\n"), "not OpenAI's API"),
        (httpx.Response(200, content=events(chunk(content="a"), end=False)), "in the middle"),
        (httpx.Response(200, content=events({"error": {"message": "died"}})), "died"),
        (httpx.Response(200, content=events({"error": "died"})), "died"),
    ],
)
def test_an_endpoint_that_misbehaves_is_told(response: httpx.Response, problem: str) -> None:
    with pytest.raises(EndpointError, match=problem):
        ask(client(lambda _: response))


def test_an_endpoint_that_is_not_there_or_goes_away_is_told() -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("connection reset", request=request)

    with pytest.raises(EndpointError, match="http://host/v1 doesn't answer: connection reset"):
        ask(client(gone))

    async def reach() -> None:
        made = HttpClient("http://127.0.0.1:1")
        try:
            await made.start(lambda _what, _share: None)
        finally:
            await made.close()

    with pytest.raises(EndpointError, match="doesn't answer"):
        asyncio.run(reach())


def snapshots(handler: Handler) -> list[EngineSnapshot | None]:
    async def run() -> list[EngineSnapshot | None]:
        made = client(handler)
        try:
            return [await made.snapshot() for _ in range(2)]
        finally:
            await made.close()

    return asyncio.run(run())


def test_the_block_map_of_an_endpoint_of_ours_is_shown():
    runs = {"owners": [[-1, 6]], "ref_counts": [[0, 6]], "is_cached": [[1, 2], [0, 4]]}
    body = {"engine": {"num_blocks": 6, "new": 1}, "blocks": {"sequences": [], "pools": [runs]}}
    paths: list[str] = []

    def respond(request: httpx.Request) -> httpx.Response:
        paths.append(str(request.url))
        return httpx.Response(200, json=body)

    for snapshot in snapshots(respond):
        assert snapshot is not None
        assert snapshot.stats.num_blocks == 6
        assert snapshot.pools[0].is_cached.tolist() == [True] * 2 + [False] * 4
    assert paths == ["http://host/v1/stats?blocks=true"] * 2


def test_the_block_map_knows_what_was_asked_here():
    counts = ("num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "num_cached_tokens")
    plain = dict.fromkeys(
        ("index", "priority", "num_missing_blocks", "num_preemptions", *counts), 0
    )
    sequences = [
        {**plain, "request_id": name, "status": "running", "block_ids": []}
        for name in ("chatcmpl-1", "of-others")
    ]
    blocks = {"sequences": sequences, "pools": []}

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/stats"):
            return httpx.Response(200, json={"engine": {}, "blocks": blocks})
        answer = [{"id": "chatcmpl-1", **each} for each in (chunk(content="Hi"), chunk(0, "stop"))]
        return httpx.Response(200, content=events(*answer))

    async def run() -> list[str]:
        made = client(respond)
        request = ChatRequest("ours", [{"role": "user", "content": "Hi"}])
        assert [delta.text async for delta in made.answer(request)] == ["Hi", ""]
        snapshot = await made.snapshot()
        await made.close()
        assert snapshot is not None
        return [each.request_id for each in snapshot.sequences]

    assert asyncio.run(run()) == ["ours", "of-others"]


def test_an_endpoint_that_went_away_may_show_its_blocks_again():
    answers = [
        httpx.ConnectError("refused"),
        httpx.Response(503, content=b"starting"),
        httpx.Response(200, json={"engine": {}, "blocks": {"sequences": [], "pools": []}}),
    ]

    def respond(_request: httpx.Request) -> httpx.Response:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run() -> None:
        made = client(respond)
        for problem in ("doesn't answer", "503: starting"):
            with pytest.raises(EndpointError, match=problem):
                await made.snapshot()
        assert await made.snapshot() is not None
        await made.close()

    asyncio.run(run())


@pytest.mark.parametrize("body", [b"not found", b"{}", b"[1]", b'{"engine": {}, "blocks": 5}'])
def test_an_endpoint_without_a_block_map_is_asked_once(body: bytes):
    asked: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(404, content=body)

    assert snapshots(respond) == [None, None]
    assert len(asked) == 1
