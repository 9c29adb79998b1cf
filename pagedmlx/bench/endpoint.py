"""Benchmark of a running endpoint: requests come at a rate, whether it keeps up or not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from pagedmlx.bench.measure import Bounds, Served, summarize
from pagedmlx.bench.workload import Workload, arrivals, text_prompt
from pagedmlx.errors import PagedMLXError, first_line

_TIMEOUT = httpx.Timeout(10.0, read=600.0)
"""A request may wait for minutes behind others; that is what is measured."""


class EndpointError(PagedMLXError):
    """The endpoint can't be reached, or is none."""

    http_status = 502


@dataclass(frozen=True, slots=True)
class Ask:
    """How an endpoint is asked.

    Attributes:
        model: Its name there; empty takes the first one that is listed.
        completions: Use ``/completions`` in place of ``/chat/completions``.
        ignore_eos: Have outputs go on to their full length; not every endpoint knows that field.
    """

    model: str = ""
    completions: bool = False
    ignore_eos: bool = True


class Endpoint:
    """An address that speaks OpenAI's API.

    Args:
        url: With or without ``/v1``.
        ask: How requests are made.
        api_key: Sent as a bearer token.
        transport: For tests.
    """

    def __init__(
        self,
        url: str,
        ask: Ask,
        api_key: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        base = url.strip().rstrip("/")
        base = base if "://" in base else f"http://{base}"
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        self.model = ask.model
        self._ask = ask
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # As many connections as there are requests: a client's own queue would hide the server's.
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=_TIMEOUT,
            transport=transport,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def __aenter__(self) -> Endpoint:
        """See which models it has.

        Raises:
            EndpointError: It doesn't answer as an OpenAI endpoint does.
        """
        try:
            response = await self._http.get(f"{self.url}/models")
            response.raise_for_status()
            names = [each["id"] for each in response.json()["data"]]
            self.model = self.model or names[0]
        except BaseException as error:
            await self._http.aclose()
            if not isinstance(error, httpx.HTTPError | httpx.InvalidURL | ValueError | LookupError):
                raise
            raise EndpointError(
                f"no OpenAI endpoint answers at {self.url}: {first_line(error)}",
                hint="pagedmlx serve starts one; --url says where it is",
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def serve(self, prompt: str, num_outputs: int) -> Served:
        """Send one request and note when each piece of its answer comes; failures are noted too."""
        served = Served(time.perf_counter())
        try:
            async with self._answer(prompt, num_outputs) as chunks:
                async for chunk in chunks:
                    _note(served, chunk, time.perf_counter())
        except (httpx.HTTPError, ValueError, EndpointError) as error:
            served.error = first_line(error)
        if not served.error and not served.times_s:
            served.error = "the answer is empty"
        # Without usage a piece is taken for a token.
        served.num_output_tokens = served.num_output_tokens or len(served.times_s)
        return served

    @asynccontextmanager
    async def _answer(
        self, prompt: str, num_outputs: int
    ) -> AsyncIterator[AsyncIterator[Mapping[str, Any]]]:
        path = "completions" if self._ask.completions else "chat/completions"
        said = (
            {"prompt": prompt}
            if self._ask.completions
            else {"messages": [{"role": "user", "content": prompt}]}
        )
        body = {
            "model": self.model,
            **said,
            "max_tokens": num_outputs,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ask.ignore_eos:
            body["ignore_eos"] = True
        async with self._http.stream("POST", f"{self.url}/{path}", json=body) as response:
            if not response.is_success:
                text = (await response.aread()).decode("utf-8", "replace")
                raise EndpointError(f"status {response.status_code}: {_reason(text)}")
            yield _chunks(response)


async def _chunks(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    async for line in response.aiter_lines():
        value = line.removeprefix("data:").strip()
        if line.startswith("data:") and value and value != "[DONE]":
            yield json.loads(value)


def _reason(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:200]


def _note(served: Served, chunk: Mapping[str, Any], now: float) -> None:
    if chunk.get("error"):
        error = chunk["error"]
        served.error = str(error.get("message", error) if isinstance(error, Mapping) else error)
    usage = chunk.get("usage") or {}
    if usage:
        served.num_prompt_tokens = usage.get("prompt_tokens", 0)
        served.num_output_tokens = usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        served.num_cached_tokens = details.get("cached_tokens")
    for choice in chunk.get("choices") or ():
        new = choice.get("delta") or {}
        if any(
            (
                choice.get("text"),
                *(new.get(k) for k in ("content", "reasoning_content", "reasoning")),
            )
        ):
            served.times_s.append(now)


async def serve_at_rate(
    endpoint: Endpoint,
    workload: Workload,
    rate: float,
    bounds: Bounds,
    tell: Callable[[int, int], None],
) -> dict[str, Any]:
    """Send the workload's requests as a Poisson process.

    Args:
        endpoint: Where to.
        workload: The same for every rate: lengths, texts and the order of arrivals.
        rate: Requests a second; infinite is all at once.
        bounds: What counts for the goodput.
        tell: Told how many of how many are done.
    """
    generator = workload.generator()
    lengths = workload.lengths(generator)
    prompts = [text_prompt(generator, num_inputs) for num_inputs, _ in lengths]
    times = arrivals(generator, rate, len(lengths))
    num_done = 0

    async def send(prompt: str, num_outputs: int, at_s: float) -> Served:
        nonlocal num_done
        await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
        served = await endpoint.serve(prompt, num_outputs)
        num_done += 1
        tell(num_done, len(lengths))
        return served

    tell(0, len(lengths))
    began_s = time.perf_counter()
    served = await asyncio.gather(
        *(
            send(prompt, num_outputs, at_s)
            for prompt, (_, num_outputs), at_s in zip(prompts, lengths, times, strict=True)
        )
    )
    # JSON knows no infinity.
    return {"rate_per_s": None if rate == float("inf") else rate} | summarize(served, bounds)
