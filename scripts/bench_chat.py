"""What the chat costs: throughput with the map at 10 Hz and without, and frames of a long answer.

    python scripts/bench_chat.py --json FILE [--model smollm2] [--pairs 7] [--tokens 96]

Throughput: one engine, two answers at once, alternately by itself and inside the chat with its map
open; the median of the pairs' quotients is reported. Frames: a 2,000-token answer with code is
streamed into the chat; a frame is the time until the screen shows what has come, and its work is
the processor time in it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from textual._compositor import CompositorUpdate

from pagedmlx.chat.app import ChatApp
from pagedmlx.chat.client import ChatRequest, Delta
from pagedmlx.chat.demo import PAGING, DemoClient
from pagedmlx.chat.engine_client import EngineClient
from pagedmlx.chat.options import ChatOptions
from pagedmlx.chat.session import ASSISTANT, USER
from pagedmlx.config import EngineConfig
from pagedmlx.core.sampling_params import SamplingParams
from scripts.report import add_json_option, save

QUESTIONS = ("Why is the sky blue?", "How does a page table work?")
NUM_FRAME_TOKENS = 2000
WORDS_PER_FRAME = 8
SIZE = (120, 40)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the chat costs.")
    add_json_option(parser)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"model": arguments.model}
    report["throughput"] = asyncio.run(throughput(arguments))
    report["frames"] = asyncio.run(frames())
    save(report, arguments.json)


async def throughput(arguments: argparse.Namespace) -> dict[str, Any]:
    client = EngineClient(EngineConfig(model=arguments.model, num_blocks=256, seed=1))
    await client.start(lambda _what, _share: None)
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    await alone(client, params, "warm")
    pairs: list[dict[str, float]] = []
    for place in range(arguments.pairs):
        kinds = ("alone", "chat") if place % 2 == 0 else ("chat", "alone")
        pair: dict[str, float] = {}
        for kind in kinds:
            run = alone if kind == "alone" else in_chat
            pair[kind] = await run(client, params, f"{kind}-{place}")
        pairs.append(pair)
        print(f"alone {pair['alone']:.1f} tok/s, in the chat {pair['chat']:.1f} tok/s")
    await client.close()
    share = statistics.median(pair["chat"] / pair["alone"] for pair in pairs)
    print(f"the chat leaves {share:.1%} of the throughput (median of {len(pairs)} pairs)")
    return {"tokens": arguments.tokens, "pairs": pairs, "median_share": share}


async def alone(client: EngineClient, params: SamplingParams, name: str) -> float:
    """Tokens a second of both answers without a screen."""

    async def answer(question: str) -> None:
        message = {"role": "user", "content": f"{name}: {question}"}
        async for _ in client.answer(ChatRequest(f"{name} {question}", [message], params)):
            pass

    began_s = time.perf_counter()
    await asyncio.gather(*map(answer, QUESTIONS))
    return len(QUESTIONS) * (params.max_tokens or 0) / (time.perf_counter() - began_s)


class Kept:
    """A client that the chat may close, and that goes on; it tells when all answers have ended."""

    def __init__(self, client: EngineClient) -> None:
        self.ended = asyncio.Event()
        self._client = client
        self._num_ended = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def answer(self, request: ChatRequest) -> AsyncGenerator[Delta]:
        async for delta in self._client.answer(request):
            yield delta
        self._num_ended += 1
        if self._num_ended == len(QUESTIONS):
            self.ended.set()

    async def start(self, _on_progress: object) -> None:
        return

    async def close(self) -> bool:
        return True


async def in_chat(client: EngineClient, params: SamplingParams, name: str) -> float:
    """Tokens a second of both answers in two tabs, with the map open."""
    kept: Any = Kept(client)
    app = ChatApp(
        ChatOptions(lambda _name: kept, "kept", params=params, given=frozenset({"temperature"}))
    )
    async with app.run_test(size=SIZE) as pilot:
        await app.ready_client()
        first = app.pane
        second = await app.open(app.new_conversation())
        await pilot.pause(0.5)
        began_s = time.perf_counter()
        await first.send(f"{name}: {QUESTIONS[0]}")
        await second.send(f"{name}: {QUESTIONS[1]}")
        # Whoever asks again and again whether they have ended takes part of what is measured.
        await kept.ended.wait()
        took_s = time.perf_counter() - began_s
        app.action_leave()
        while app.return_code is None:
            await asyncio.sleep(0.01)
    return len(QUESTIONS) * (params.max_tokens or 0) / took_s


def paint(app: ChatApp) -> None:
    """Have the app make what a terminal would get, although there is none."""
    display: Any = app._display

    def painted(screen: Any, renderable: Any) -> None:
        if isinstance(renderable, CompositorUpdate):
            renderable.render_segments(app.console)
        display(screen, renderable)

    app._display = painted


async def frames() -> dict[str, Any]:
    """How long the screen takes for each piece of a long answer with code."""
    app = ChatApp(ChatOptions(lambda _name: DemoClient(), "demo"))
    paint(app)
    words = (PAGING * (NUM_FRAME_TOKENS // len(PAGING.split()) + 1)).split(" ")[:NUM_FRAME_TOKENS]
    took_ms: list[float] = []
    worked_ms: list[float] = []
    async with app.run_test(size=SIZE):
        await app.ready_client()
        pane, conversation = app.pane, app.pane.conversation
        conversation.add(USER, "Tell me everything about paging.")
        answer = conversation.add(ASSISTANT)
        await pane.sync()
        for place in range(0, len(words), WORDS_PER_FRAME):
            text = " ".join(words[: place + WORDS_PER_FRAME])
            conversation.change(answer.message_id, text=text)
            is_painted = asyncio.Event()
            began_s, worked_s = time.perf_counter(), time.thread_time()
            pane.progress.dirty.add(answer.message_id)
            pane.draw()
            app.screen.call_after_refresh(is_painted.set)
            await is_painted.wait()
            took_ms.append((time.perf_counter() - began_s) * 1000)
            worked_ms.append((time.thread_time() - worked_s) * 1000)
        app.action_leave()
        while app.return_code is None:
            await asyncio.sleep(0.01)
    found = {"count": len(took_ms), **percentiles(took_ms), "work": percentiles(worked_ms)}
    print("frames", found)
    return found


def percentiles(values: list[float]) -> dict[str, float]:
    cuts, half = statistics.quantiles(values, n=100), len(values) // 2
    return {
        "p50_ms": cuts[49],
        "p95_ms": cuts[94],
        "max_ms": max(values),
        "first_half_p50_ms": statistics.median(values[:half]),
        "second_half_p50_ms": statistics.median(values[half:]),
    }


if __name__ == "__main__":
    main()
