"""Many clients on a pool that is much too small, some of which leave: every other answer is right.

    python scripts/soak_server.py --clients 64 --minutes 5 --json FILE     (- is stdout)

A tiny model is served by a process of its own. Each answer must be what the same request gives
alone, with a large pool and no prefix cache. Afterwards all blocks must be back within a second,
and memory must not have grown. The exit code is 1 if anything of that is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.models.blas import load_fast_blas

load_fast_blas()  # counts only before MLX is imported

from pagedmlx import LLM, SamplingParams
from pagedmlx.engine.outputs import CompletionOutput
from scripts.report import add_json_option, save
from scripts.serving import (
    ServerProcess,
    percentiles,
    post_bytes,
    read_body,
    read_events,
    read_head,
    server_process,
)
from tests.support.tiny_models import save_tiny_folder

BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
OVERCOMMIT = 4
NUM_CASES = 96
NEAR_TIE = 1e-4
MAX_NEAR_TIES = 1 / 10_000
GROWTH = 0.10
ANSWER_S = 300.0
SHORT_S = 20.0  # in less the caches are not warm, and times say nothing

Stage = tuple[str, float]


@dataclass(frozen=True)
class Case:
    """One request of the mix and what it gives alone."""

    path: str
    body: dict[str, Any]
    num_tokens: int
    alone: CompletionOutput


@dataclass
class Findings:
    answers: int = 0
    tokens: int = 0
    left: Counter[str] = field(default_factory=Counter[str])
    near_ties: list[str] = field(default_factory=list[str])
    failures: list[str] = field(default_factory=list[str])
    ttft_s: list[float] = field(default_factory=list[float])
    itl_s: list[float] = field(default_factory=list[float])
    rss: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])


def make_cases(model: Path, count: int) -> list[Case]:
    """Requests of mixed lengths, some with common beginnings, and their answers alone."""
    chance = random.Random(1)
    words = ["the", "sea", "block", "né", "🙂", "table", "of", "42", "\n", "is"]
    systems = [" ".join(chance.choices(words, k=length)) for length in (8, 20, 30)]
    wanted: list[tuple[str, Any, SamplingParams]] = []
    for _ in range(count):
        text = " ".join(chance.choices(words, k=chance.choice((1, 3, 10, 25, 40))))
        params = SamplingParams(
            temperature=0.0,
            max_tokens=chance.choice((1, 2, 8, 24, 48, 96)),
            ignore_eos=chance.random() < 0.5,
            stop=("th",) if chance.random() < 0.2 else (),
            n=chance.choice((1, 1, 1, 2)),
            logprobs=2,
        )
        if chance.random() < 0.5:
            system = {"role": "system", "content": chance.choice(systems)}
            wanted.append(("chat", [system, {"role": "user", "content": text}], params))
        else:
            wanted.append(("text", f"{chance.choice(systems)} {text}", params))
    cases: list[Case] = []
    with LLM(
        str(model),
        num_blocks=256,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1,
        enable_prefix_caching=False,
    ) as llm:
        for kind, prompt, params in wanted:
            run = llm.chat if kind == "chat" else llm.generate
            (output,) = run(prompt, params)
            body = {
                "messages" if kind == "chat" else "prompt": prompt,
                "temperature": 0,
                "max_tokens": params.max_tokens,
                "ignore_eos": params.ignore_eos,
                "stop": list(params.stop),
                "n": params.n,
            }
            path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
            num_tokens = len(output.prompt_token_ids) + (params.max_tokens or 0) * params.n
            cases.append(Case(path, body, num_tokens, output.outputs[0]))
    return cases


async def client(
    number: int, server: ServerProcess, cases: list[Case], end: float, found: Findings
) -> None:
    """Ask for one thing after the other; leave a third of the answers at some stage."""
    chance = random.Random(number)
    while time.monotonic() < end:
        case = chance.choice(cases)
        stream = chance.random() < 0.7
        leaves: Stage | None = None
        if chance.random() < 1 / 3:
            kinds = ("sent", "head", "events") if stream else ("sent", "waiting")
            leaves = (chance.choice(kinds), chance.random())
        try:
            async with asyncio.timeout(ANSWER_S):
                await ask(server.port, case, leaves, found, stream=stream)
        except (OSError, ValueError, TimeoutError) as error:
            found.failures.append(f"client {number}: {type(error).__name__}: {error}")


async def ask(
    port: int, case: Case, leaves: Stage | None, found: Findings, *, stream: bool
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        begun = time.monotonic()
        writer.write(post_bytes(case.path, json.dumps({**case.body, "stream": stream}).encode()))
        await writer.drain()
        kind, amount = leaves or ("", 0.0)
        if kind:
            found.left[kind] += 1
        if kind == "waiting":
            await asyncio.sleep(amount * 0.5)
        if kind in ("sent", "waiting"):
            return
        status, headers = await read_head(reader)
        if kind == "head":
            return
        if status != 200:
            body = b"".join([part async for part in read_body(reader, headers)])
            found.failures.append(f"status {status}: {body[:200]!r}")
        elif stream:
            most = int(amount * 12) if kind else None
            choices = await read_stream(reader, headers, begun, most, found)
            if choices is not None:
                compare(case, choices, found)
        else:
            body = json.loads(b"".join([part async for part in read_body(reader, headers)]))
            choices = {
                each["index"]: (
                    each.get("text") or each.get("message", {}).get("content") or "",
                    each["finish_reason"],
                )
                for each in body["choices"]
            }
            compare(case, choices, found)
    finally:
        writer.transport.abort()


async def read_stream(
    reader: asyncio.StreamReader,
    headers: dict[str, str],
    begun: float,
    most: int | None,
    found: Findings,
) -> dict[int, tuple[str, str | None]] | None:
    """The choices of a stream; None if it was left after ``most`` events."""
    choices: dict[int, tuple[str, str | None]] = {}
    last: float | None = None
    num_events = 0
    is_done = False
    async for event in read_events(reader, headers):
        num_events += 1
        if most is not None and num_events > most:
            return None
        if event is None:
            continue
        if event == "[DONE]":
            is_done = True
            continue
        if "error" in event:
            raise ValueError(f"an error in a stream: {event['error']}")
        now = time.monotonic()
        (choice,) = event["choices"]
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        before, _ = choices.get(choice["index"], ("", None))
        choices[choice["index"]] = (before + text, choice["finish_reason"])
        if choice["index"] == 0 and text:
            if last is None:
                found.ttft_s.append(now - begun)
            else:
                found.itl_s.append(now - last)
            last = now
    if not is_done:
        raise ValueError("a stream ended without [DONE]")
    return None if most is not None else choices


def compare(case: Case, choices: dict[int, tuple[str, str | None]], found: Findings) -> None:
    """Look whether an answer is complete and the one that the request gives alone."""
    found.answers += 1
    if sorted(choices) != list(range(case.body["n"])):
        found.failures.append(f"choices {sorted(choices)} instead of {case.body['n']}")
    for text, reason in choices.values():
        found.tokens += len(case.alone.token_ids)
        if text == case.alone.text and reason == case.alone.finish_reason:
            continue
        gap = gap_at(case.alone, text)
        line = f"{text!r} ({reason}) is not {case.alone.text!r} ({case.alone.finish_reason})"
        if gap < NEAR_TIE:
            found.near_ties.append(f"{line}; gap {gap:.2g}")
        else:
            found.failures.append(f"{line}; gap {gap:.2g}")


def gap_at(alone: CompletionOutput, text: str) -> float:
    """Distance of the two likeliest tokens where a text begins to differ."""
    same = next(
        (i for i, (a, b) in enumerate(zip(alone.text, text, strict=False)) if a != b),
        min(len(alone.text), len(text)),
    )
    # A token may show late, so the ones just before count too.
    gaps = [
        each.top[0].logprob - each.top[1].logprob
        for each in alone.logprobs or ()
        if each.start <= same <= each.end + 1
    ]
    return min(gaps, default=float("inf"))


async def watch_memory(server: ServerProcess, found: Findings) -> None:
    begun = time.monotonic()
    while True:
        rss = await asyncio.to_thread(server.rss_bytes)
        found.rss.append((time.monotonic() - begun, rss))
        await asyncio.sleep(1.0)


async def run_clients(
    server: ServerProcess, cases: list[Case], num_clients: int, seconds: float, found: Findings
) -> None:
    watcher = asyncio.create_task(watch_memory(server, found))
    end = time.monotonic() + seconds
    await asyncio.gather(*(client(i, server, cases, end, found) for i in range(num_clients)))
    watcher.cancel()


def seconds_until_idle(server: ServerProcess, most_s: float = 60.0) -> float | None:
    """How long it takes until no block is held any more; None if that doesn't happen."""
    begun = time.monotonic()
    while time.monotonic() < begun + most_s:
        stats = server.get("/v1/stats")
        engine = stats["engine"]
        if not (stats["requests"] or engine["num_used_blocks"] or engine["num_running"]):
            return time.monotonic() - begun
        time.sleep(0.02)
    return None


def memory(found: Findings, seconds: float) -> dict[str, Any]:
    """The first minute against the last one; of a short run, the thirds."""
    part = min(60.0, seconds / 3)
    # What is loaded at first use is no growth.
    settled = [rss for at, rss in found.rss if part * 0.25 <= at <= part]
    last = [rss for at, rss in found.rss if at >= found.rss[-1][0] - part]
    first_bytes, last_bytes = statistics.median(settled or last), statistics.median(last)
    return {
        "first_bytes": int(first_bytes),
        "last_bytes": int(last_bytes),
        "growth": round(last_bytes / first_bytes - 1, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--cases", type=int, default=NUM_CASES, help="requests in the mix")
    add_json_option(parser, default="-")
    options = parser.parse_args()
    seconds = options.minutes * 60
    found = Findings()
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_folder(Path(folder) / "tiny", max_model_len=MAX_MODEL_LEN)
        cases = make_cases(model, options.cases)
        mean = statistics.mean(case.num_tokens for case in cases)
        wanted = int(options.clients * mean / BLOCK_SIZE / OVERCOMMIT)
        num_blocks = max(wanted, max(case.num_tokens for case in cases) // BLOCK_SIZE + 2)
        with server_process(
            model,
            *("--num-blocks", str(num_blocks), "--block-size", str(BLOCK_SIZE)),
            *("--max-model-len", str(MAX_MODEL_LEN), "--keep-alive", "1"),
        ) as server:
            asyncio.run(run_clients(server, cases, options.clients, seconds, found))
            idle_s = seconds_until_idle(server)
            stats = server.get("/v1/stats")["engine"]
            is_healthy = server.get("/health")["status"] == "ready"
    used = memory(found, seconds)
    checks = {
        "answers are right": not found.failures and found.answers > 0,
        "near ties are rare": len(found.near_ties) <= max(1, found.tokens * MAX_NEAR_TIES),
        "blocks are back": idle_s is not None,
        "within a second": (idle_s or 0.0) <= 1.0 or seconds < SHORT_S,
        "memory is flat": used["growth"] <= GROWTH or seconds < SHORT_S,
        "the engine is healthy": is_healthy,
    }
    report = {
        "script": "soak_server.py",
        "clients": options.clients,
        "seconds": seconds,
        "num_blocks": num_blocks,
        "answers": found.answers,
        "tokens": found.tokens,
        "left": dict(found.left),
        "near_ties": found.near_ties,
        "failures": found.failures[:50],
        "num_failures": len(found.failures),
        "idle_after_s": idle_s,
        "memory": used,
        "ttft_ms": percentiles(found.ttft_s),
        "itl_ms": percentiles(found.itl_s),
        "waits": stats["num_waits"],
        "preemptions": stats["num_preemptions"],
        "evictions": stats["num_evictions"],
        "checks": checks,
        "passed": all(checks.values()),
    }
    save(report, options.json)
    for line in (*found.near_ties, *found.failures[:10]):
        print(line, file=sys.stderr)
    print(
        f"{found.answers} answers, {sum(found.left.values())} left, TTFT {report['ttft_ms']} ms, "
        f"ITL {report['itl_ms']} ms, {stats['num_waits']} waits, "
        f"{stats['num_preemptions']} preemptions",
        file=sys.stderr,
    )
    for name, is_so in checks.items():
        print(f"{'ok  ' if is_so else 'FAIL'} {name}", file=sys.stderr)
    sys.exit(not report["passed"])


if __name__ == "__main__":
    main()
