"""The client over the engine in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagedmlx.chat.client import ChatRequest, Delta
from pagedmlx.chat.engine_client import EngineClient
from pagedmlx.config import EngineConfig
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import EngineClosedError, ModelNotFoundError, PagedMLXError, PoolTooSmallError
from tests.support.chat import engine_client

QUESTION = [{"role": "user", "content": "Why?"}]


def request(request_id: str = "r", **settings: Any) -> ChatRequest:
    return ChatRequest(
        request_id, QUESTION, SamplingParams(**{"temperature": 0.0, "max_tokens": None, **settings})
    )


async def started(client: EngineClient) -> EngineClient:
    await client.start(lambda _what, _share: None)
    return client


def test_an_answer_streams_with_its_counts() -> None:
    async def run() -> tuple[list[Delta], EngineClient]:
        client = await started(engine_client("Yes."))
        deltas = [delta async for delta in client.answer(request())]
        assert await client.close()
        return deltas, client

    deltas, client = asyncio.run(run())
    assert "".join(each.text for each in deltas) == "Yes."
    assert [each.finish for each in deltas if each.finish] == ["stop"]
    assert deltas[-1].num_output_tokens == 5
    assert deltas[-1].num_prompt_tokens is not None
    assert deltas[-1].ttft_s is not None
    assert client.max_len == 257
    assert client.notes == ("fake",)


def test_a_second_turn_finds_the_blocks_of_the_first() -> None:
    async def run() -> int:
        client = await started(engine_client("Yes."))
        async for _ in client.answer(request("a")):
            pass
        talk = [*QUESTION, {"role": "assistant", "content": "Yes."}, *QUESTION]
        again = ChatRequest("b", talk, SamplingParams(temperature=0.0, max_tokens=None))
        cached = [delta.num_cached_tokens async for delta in client.answer(again)]
        await client.close()
        return cached[-1] or 0

    assert asyncio.run(run()) >= 24


def test_leaving_an_answer_frees_its_blocks() -> None:
    async def run() -> None:
        client = await started(engine_client("a" * 150))
        answer = client.answer(request())
        await anext(answer)
        await answer.aclose()
        for _ in range(200):
            snapshot = await client.snapshot()
            assert snapshot is not None
            if snapshot.stats.num_running == 0:
                break
            await asyncio.sleep(0.01)
        assert snapshot.stats.num_used_blocks == 0
        await client.close()

    asyncio.run(run())


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    async def run() -> None:
        client = await started(engine_client(num_blocks=8))
        with pytest.raises(PoolTooSmallError, match="pool"):
            async for _ in client.answer(
                ChatRequest("r", [{"role": "user", "content": "long " * 20}])
            ):
                pass
        await client.close()

    asyncio.run(run())


def test_before_the_start_and_after_the_end_there_is_no_engine() -> None:
    async def run() -> None:
        client = engine_client()
        assert await client.snapshot() is None
        with pytest.raises(EngineClosedError):
            await anext(client.answer(request()))
        await started(client)
        assert await client.snapshot() is not None
        assert await client.close()
        assert await client.snapshot() is None
        assert await client.close()

    asyncio.run(run())


def test_a_model_that_is_not_there_is_told_before_anything_is_loaded() -> None:
    async def run() -> None:
        client = EngineClient(EngineConfig(model="no-such-model"))
        with pytest.raises(ModelNotFoundError, match="no-such-model"):
            await client.start(lambda _what, _share: None)
        assert await client.close()

    asyncio.run(run())


def test_a_missing_mlx_is_explained() -> None:
    def build(_report: Any) -> Any:
        raise ImportError("libmlx.so: cannot open shared object file")

    async def run() -> None:
        from pagedmlx.engine.worker import EngineWorker

        client = EngineClient(EngineConfig(), lambda report: EngineWorker(build, report))
        with pytest.raises(PagedMLXError, match="MLX can't be loaded") as caught:
            await client.start(lambda _what, _share: None)
        assert "pagedmlx[cpu]" in caught.value.hint

    asyncio.run(run())
