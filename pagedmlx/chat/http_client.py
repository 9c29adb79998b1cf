"""HttpClient: answers from any endpoint that speaks OpenAI's chat API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import httpx2 as httpx

from pagedmlx.chat.client import ChatRequest, Delta
from pagedmlx.chat.reasoning import split_reasoning
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.snapshot import EngineSnapshot
from pagedmlx.core.snapshot_json import snapshot_from_json
from pagedmlx.errors import PagedMLXError, first_line
from pagedmlx.progress import ProgressCallback

_TIMEOUT = httpx.Timeout(10.0, read=300.0)
"""A long prompt may keep an endpoint busy for minutes before its first token."""

_STANDARD = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "max_tokens")
_FURTHER = ("top_k", "min_p", "repetition_penalty")
"""Fields that not every endpoint knows, sent only if they are set."""


class EndpointError(PagedMLXError):
    """The endpoint can't be reached, refuses, or went away."""

    http_status = 502


class HttpClient:
    """A ``ChatClient`` over HTTP.

    Args:
        url: The endpoint's address, with or without ``/v1``.
        model: The model to ask for; empty takes the first one that it lists.
        api_key: Sent as a bearer token.
        transport: For tests.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        api_key: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = _base(url)
        self.name = model
        self.max_len: int | None = None
        self.notes: tuple[str, ...] = ()
        self.defaults: Mapping[str, float] = {}
        self._has_blocks = True
        self._asked: dict[str, str] = {}
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(headers=headers, timeout=_TIMEOUT, transport=transport)

    async def start(self, on_progress: ProgressCallback) -> None:
        """Reach the endpoint and see which model it has."""
        on_progress(f"reaching {self.url}", None)
        async with self._errors():
            response = await self._http.get(f"{self.url}/models")
            await _check(response)
            models = response.json()["data"]
            if not self.name:
                self.name = models[0]["id"]
            found = next((each for each in models if each["id"] == self.name), {})
            length = found.get("max_model_len")
            self.max_len = length if isinstance(length, int) else None

    async def answer(self, request: ChatRequest) -> AsyncGenerator[Delta]:
        """Answer a question; closing the stream tells the endpoint to stop."""
        body = {
            "model": self.name,
            "messages": [_sent(message) for message in request.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **_settings(request.params),
        }
        began_s = monotonic()
        writer = _Writer(request.params.n, began_s)
        async with (
            self._errors(),
            self._http.stream("POST", f"{self.url}/chat/completions", json=body) as response,
        ):
            await _check(response)
            async for line in response.aiter_lines():
                value = line.removeprefix("data:").strip()
                if not line.startswith("data:") or not value:
                    continue
                if value == "[DONE]":
                    break
                chunk = json.loads(value)
                if isinstance(chunk.get("id"), str):
                    self._asked[chunk["id"]] = request.request_id
                for delta in writer.read(chunk):
                    yield delta
            if writer.open_outputs:
                raise EndpointError(
                    f"{self.url} ended the answer in the middle", hint="/retry asks again"
                )

    async def snapshot(self) -> EngineSnapshot | None:
        """Who holds which block, where the endpoint is ours; None else.

        Raises:
            EndpointError: It doesn't answer; it may again.
        """
        if not self._has_blocks:
            return None
        async with self._errors():
            response = await self._http.get(f"{self.url}/stats", params={"blocks": "true"})
        if response.is_server_error:
            await _check(response)
        try:
            body = response.json()
            found = snapshot_from_json(body["engine"], body["blocks"])
        except (ValueError, KeyError, TypeError):
            self._has_blocks = False
            return None
        # The endpoint has names of its own for what was asked here.
        named = (
            replace(each, request_id=self._asked.get(each.request_id, each.request_id))
            for each in found.sequences
        )
        return replace(found, sequences=tuple(named))

    async def close(self) -> bool:
        """Close the connections."""
        await self._http.aclose()
        return True

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            what = "doesn't answer" if isinstance(error, httpx.TransportError) else "failed"
            raise EndpointError(
                f"{self.url} {what}: {first_line(error)}",
                hint="is the address right, and the server up?",
            ) from error
        except (httpx.InvalidURL, UnicodeError) as error:
            raise EndpointError(
                f"{self.url} is not an address: {error}", hint="write http://127.0.0.1:8000"
            ) from error
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise EndpointError(
                f"{self.url} answered what is not OpenAI's API: {first_line(error)}"
            ) from error


class _Writer:
    """Turns chunks into deltas; puts reasoning between the tags that the chat knows."""

    def __init__(self, n: int, began_s: float) -> None:
        self.open_outputs = set(range(n))
        self._thinking: set[int] = set()
        self._num_tokens = [0] * n
        self._began_s = began_s
        self._ttft_s: float | None = None

    def read(self, chunk: Mapping[str, Any]) -> list[Delta]:
        if chunk.get("error"):
            error = chunk["error"]
            raise EndpointError(str(error["message"] if isinstance(error, Mapping) else error))
        usage = chunk.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        deltas = [self._delta(choice) for choice in chunk.get("choices") or ()]
        if usage:
            # Of several candidates it has the sum.
            is_alone = len(self._num_tokens) == 1
            deltas.append(
                Delta(
                    num_prompt_tokens=usage.get("prompt_tokens"),
                    num_cached_tokens=cached,
                    num_output_tokens=usage.get("completion_tokens") if is_alone else None,
                )
            )
        return deltas

    def _delta(self, choice: Mapping[str, Any]) -> Delta:
        index = choice.get("index", 0)
        new = choice.get("delta") or {}
        reasoning = new.get("reasoning_content") or new.get("reasoning") or ""
        text = new.get("content") or ""
        if reasoning and index not in self._thinking:
            self._thinking.add(index)
            reasoning = f"<think>\n{reasoning}"
        if index in self._thinking and (text or choice.get("finish_reason")):
            self._thinking.discard(index)
            text = f"\n</think>\n\n{text}"
        if (text or reasoning) and self._ttft_s is None:
            self._ttft_s = monotonic() - self._began_s
        # One chunk is about one token; the usage at the end corrects it.
        self._num_tokens[index] += bool(text or reasoning)
        if choice.get("finish_reason"):
            self.open_outputs.discard(index)
        return Delta(
            index=index,
            text=reasoning + text,
            finish=choice.get("finish_reason"),
            num_output_tokens=self._num_tokens[index],
            ttft_s=self._ttft_s,
        )


def _base(url: str) -> str:
    base = url.strip().rstrip("/")
    if "://" not in base:
        base = f"http://{base}"
    return base if base.endswith("/v1") else f"{base}/v1"


def _settings(params: SamplingParams) -> dict[str, Any]:
    plain = SamplingParams()
    values = {name: getattr(params, name) for name in _STANDARD}
    further = {name: getattr(params, name) for name in _FURTHER}
    sent = {name: value for name, value in values.items() if value is not None}
    sent |= {name: value for name, value in further.items() if value != getattr(plain, name)}
    if params.stop:
        sent["stop"] = list(params.stop)
    if params.n > 1:
        sent["n"] = params.n
    return sent


def _sent(message: Mapping[str, str]) -> dict[str, str]:
    if message["role"] != "assistant":
        return dict(message)
    return {**message, "content": split_reasoning(message["content"]).answer}


async def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    await response.aread()
    try:
        error = response.json()["error"]
        reason = error["message"] if isinstance(error, Mapping) else str(error)
    except (ValueError, KeyError, TypeError):
        reason = response.text.strip()[:200] or response.reason_phrase
    raise EndpointError(f"{response.url.host} refuses with {response.status_code}: {reason}")
