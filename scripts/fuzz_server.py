"""Valid, broken and hostile requests: no 5xx, no hang, nothing leaks, and the engine stays well.

    python scripts/fuzz_server.py --requests 5000 --json FILE [--seed 1]     (- is stdout)

A tiny model is served in this process, so that every record of the server and of the engine can be
looked at in the end. The exit code is 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.config import EngineConfig
from pagedmlx.engine.load import load_engine
from scripts.fuzz_requests import BODY_S, HEADER_S, MAX_BODY, Attack, Maker
from scripts.report import add_json_option, save
from scripts.serving import read_body, read_head
from tests.support.embedding_model import save_embedding_folder
from tests.support.server import RunningServer, serving

CONCURRENT = 24
HANG_S = 60.0
MAY_CLOSE = ("odd HTTP", "huge", "stalled", "headers")

_ENDS = (
    b"data: [DONE]\n\n",
    b"event: response.completed\n",
    b"event: response.incomplete\n",
    b"event: message_stop\n",
)
_ERRORS = (b'data: {"error"', b"event: response.failed\n", b"event: error\n")
_FAULTS = (b'"type":"server_error"', b'"code":"server_error"', b'"type":"api_error"')


@dataclass
class Findings:
    statuses: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])


class FaultLog(logging.Handler):
    """Counts what the server logs as a fault of its own."""

    def __init__(self, found: Findings) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.failures.append(f"logged: {self.format(record)[-2000:]}")


async def carry_out(server: RunningServer, attack: Attack, found: Findings) -> None:
    try:
        async with asyncio.timeout(HANG_S):
            status = await _send(server.port, attack)
    except TimeoutError:
        found.failures.append(f"{attack.name}: hangs: {attack.data[:300]!r}")
        return
    except (ConnectionError, asyncio.LimitOverrunError):
        # The server may close on what it has not read to its end; what it says can be lost then.
        status = "closed"
    found.statuses[f"{attack.name} {status}"] += 1
    is_lost = status == "closed" and attack.name not in MAY_CLOSE
    if is_lost or status.startswith("5") or "error in stream 5" in status:
        found.failures.append(f"{attack.name}: {status}: {attack.data[:300]!r}")


async def _send(port: int, attack: Attack) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(attack.data)
        await writer.drain()
        if attack.leaves_after_s is not None:
            await asyncio.sleep(attack.leaves_after_s)
            return "left"
        status, headers = await read_head(reader)
        while status == 100:
            status, headers = await read_head(reader)
        if "content-length" not in headers and "transfer-encoding" not in headers:
            return str(status)
        body = b"".join([part async for part in read_body(reader, headers)])
        if headers.get("content-type", "").startswith("text/event-stream"):
            return _of_stream(status, body)
        return str(status)
    finally:
        if attack.is_reset:
            writer.transport.abort()
        else:
            writer.close()


def _of_stream(status: int, body: bytes) -> str:
    """How it ended: each kind of stream has one end mark, or one error and none."""
    ends = sum(map(body.count, _ENDS))
    if any(mark in body for mark in _ERRORS):
        is_ours = any(mark in body for mark in _FAULTS)
        return f"error in stream {500 if is_ours else 400}" if ends == 0 else "5: end after error"
    return f"{status} stream" if ends == 1 else f"5: {ends} ends"


async def attack_all(server: RunningServer, count: int, seed: int, found: Findings) -> None:
    maker = Maker(random.Random(seed))
    attacks = iter([maker.attack() for _ in range(count)])

    async def worker() -> None:
        for attack in attacks:
            await carry_out(server, attack, found)

    await asyncio.gather(*(worker() for _ in range(CONCURRENT)))


def check_end(server: RunningServer, found: Findings) -> dict[str, bool]:
    """What must be so after all of it."""
    is_quiet = not found.failures
    try:
        server.assert_idle()
        is_clean = True
    except AssertionError as error:
        found.failures.append(f"something is left: {error}")
        is_clean = False
    stats = server.get("/v1/stats").json["engine"]
    free = stats["num_free_blocks"] + stats["num_cached_blocks"]
    return {
        "no answer of 5xx, no hang": is_quiet,
        "nothing is left in any map": is_clean,
        "all blocks are back": free == stats["num_blocks"],
        "the engine is healthy": server.get("/health").json == {"status": "ready"},
        "it still answers": server.complete(max_tokens=3, temperature=0).status == 200,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    add_json_option(parser, default="-")
    options = parser.parse_args()
    found = Findings()
    logging.getLogger("pagedmlx").addHandler(FaultLog(found))
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        model = save_embedding_folder(
            Path(folder) / "tiny", name="llama", max_position_embeddings=512, is_matryoshka=True
        )
        config = EngineConfig(
            str(model), num_blocks=96, max_model_len=256, max_num_waiting=64, check_integrity=True
        )
        with serving(
            partial(load_engine, config),
            header_timeout_s=HEADER_S,
            body_timeout_s=BODY_S,
            max_body_bytes=MAX_BODY,
            keep_alive_s=0.2,
        ) as server:
            asyncio.run(attack_all(server, options.requests, options.seed, found))
            checks = check_end(server, found)
    report = {
        "script": "fuzz_server.py",
        "requests": options.requests,
        "seed": options.seed,
        "statuses": dict(sorted(found.statuses.items())),
        "failures": found.failures[:50],
        "num_failures": len(found.failures),
        "checks": checks,
        "passed": all(checks.values()) and not found.failures,
    }
    save(report, options.json)
    for line in found.failures[:10]:
        print(line, file=sys.stderr)
    for name, is_so in checks.items():
        print(f"{'ok  ' if is_so else 'FAIL'} {name}", file=sys.stderr)
    sys.exit(not report["passed"])


if __name__ == "__main__":
    main()
