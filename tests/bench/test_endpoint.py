"""The benchmark of an endpoint, against our own server and against none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from pagedmlx.bench.endpoint import Ask, Endpoint, EndpointError, serve_at_rate
from pagedmlx.bench.measure import Bounds
from pagedmlx.bench.workload import Workload
from tests.support.server import MODEL, RunningServer, serving

WORK = Workload(5, 6, 4)
BOUNDS = Bounds(60.0, 60.0)


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


def measure(endpoint: Endpoint, rate: float = float("inf")) -> tuple[dict[str, Any], list[int]]:
    done: list[int] = []

    async def run() -> dict[str, Any]:
        async with endpoint:
            return await serve_at_rate(endpoint, WORK, rate, BOUNDS, lambda n, of: done.append(n))

    return asyncio.run(run()), done


@pytest.mark.parametrize("completions", [False, True])
def test_every_request_is_answered_in_full_and_counted_by_the_endpoint(
    server: RunningServer, completions: bool
) -> None:
    endpoint = Endpoint(server.url, Ask(completions=completions))
    found, done = measure(endpoint)
    assert endpoint.model == MODEL
    assert (found["num_failed"], found["errors"]) == (0, [])
    assert found["num_output_tokens"] == 5 * 4
    assert found["num_prompt_tokens"] > 5 * 6
    assert found["num_within_bounds"] == 5
    assert found["rate_per_s"] is None
    assert done == [0, 1, 2, 3, 4, 5]
    server.assert_idle()


def test_requests_come_at_the_rate_that_was_asked_for(server: RunningServer) -> None:
    found, _ = measure(Endpoint(server.url, Ask()), 50.0)
    assert found["rate_per_s"] == 50.0
    assert found["num_failed"] == 0
    # Four gaps of 20 ms on average; the seed fixes them.
    assert found["wall_s"] > 0.02


def test_a_refusal_is_counted_with_its_reason(server: RunningServer) -> None:
    found, _ = measure(Endpoint(server.url, Ask(model="another")))
    assert found["num_failed"] == 5
    (error,) = found["errors"]
    assert "404" in error
    assert "another" in error


def test_an_answer_that_breaks_off_is_a_failure() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return httpx.Response(200, text='data: {"error": {"message": "out of luck"}}\n\n')

    found, _ = measure(Endpoint("http://there", Ask(), transport=httpx.MockTransport(answer)))
    assert (found["num_failed"], found["errors"]) == (5, ["out of luck"])


def test_without_usage_a_piece_is_taken_for_a_token() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        piece = 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
        return httpx.Response(200, text=f"{piece}{piece}data: [DONE]\n\n")

    found, _ = measure(Endpoint("http://there/v1", Ask(), transport=httpx.MockTransport(answer)))
    assert found["num_output_tokens"] == 10
    assert found["num_cached_tokens"] is None


def test_an_address_without_an_endpoint_is_one_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EndpointError, match="no OpenAI endpoint answers at http://127") as caught:
        measure(Endpoint(url, Ask()))
    assert caught.value.hint
