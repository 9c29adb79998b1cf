"""Valid, broken and hostile requests: no 5xx, no hang, nothing leaks, and the engine stays well.

    python scripts/fuzz_server.py --requests 5000 --json FILE [--seed 1]     (- is stdout)

A tiny model is served in this process, so that every record of the server and of the engine can be
looked at in the end. The exit code is 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.config import EngineConfig
from pagedmlx.engine.load import load_engine
from pagedmlx.server.fields import CHAT_FIELDS, COMPLETION_FIELDS, Use
from scripts.report import save
from scripts.serving import post_bytes, read_body, read_head
from tests.support.server import RunningServer, serving
from tests.support.tiny_models import save_tiny_folder

CONCURRENT = 24
HANG_S = 60.0
HEADER_S = BODY_S = 1.0
MAX_BODY = 1 << 20

MAY_CLOSE = ("odd HTTP", "huge", "stalled", "headers")

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, 2**31, 2**63, 2**64, 10**30, -(10**30)),
    *("", "a", "\ud800", "\x00", "é" * 50, "<|end|>", "<|assistant|>", "{{ 7*7 }}", "{% raw %}"),
    *([], [[]], {}, {"a": {}}, [None], ["a"] * 70, [1] * 70, [2**40], {"1": 1}, {"-1": 5}),
    *({"type": "json_object"}, {"include_usage": 5}, [{"role": "user"}], ["", "b"], "none"),
)
ROLES = ("user", "assistant", "system", "developer", "tool", "banana", None, 5)


@dataclass
class Findings:
    statuses: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Attack:
    """Bytes to send, with pauses, and how the client behaves."""

    name: str
    data: bytes
    pause_s: float = 0.0
    leaves_after_s: float | None = None
    is_reset: bool = False


class FaultLog(logging.Handler):
    """Counts what the server logs as a fault of its own."""

    def __init__(self, found: Findings) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.failures.append(f"logged: {self.format(record)[-2000:]}")


class Maker:
    """Makes up requests from one source of chance."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def attack(self) -> Attack:
        kinds: tuple[tuple[int, Callable[[], Attack]], ...] = (
            (30, self.valid),
            (30, self.odd_fields),
            (8, self.broken_json),
            (6, self.nested),
            (6, self.bytes_of_json),
            (5, self.odd_http),
            (3, self.huge),
            (3, self.stalled),
            (3, self.headers),
            (14, self.left),
        )
        weights = [weight for weight, _ in kinds]
        return self.chance.choices([make for _, make in kinds], weights)[0]()

    def text(self) -> str:
        alphabet = "ab c\n<|>é🙂漢\u200d\x00"
        return "".join(self.chance.choices(alphabet, k=self.chance.choice((0, 1, 5, 60, 300))))

    def messages(self) -> Any:
        if self.chance.random() < 0.05:
            return self.chance.choice(ODD)
        messages: list[Any] = []
        for _ in range(self.chance.choice((1, 1, 2, 4))):
            content: Any = self.text()
            if self.chance.random() < 0.1:
                content = self.chance.choice(ODD)
            elif self.chance.random() < 0.1:
                content = [{"type": "text", "text": self.text()}, {"type": "image_url"}][:1]
            role = "user" if self.chance.random() < 0.8 else self.chance.choice(ROLES)
            messages.append({"role": role, "content": content})
        return messages

    def body(self, path: str) -> dict[str, Any]:
        chance = self.chance
        if path == "/tokenize":
            return (
                {"prompt": self.text()} if chance.random() < 0.5 else {"messages": self.messages()}
            )
        if path == "/detokenize":
            return {"tokens": chance.choices(range(262), k=chance.randrange(40))}
        body: dict[str, Any] = {"max_tokens": chance.choice((1, 2, 7, 40))}
        if path == PATHS[0]:
            body["messages"] = self.messages()
        else:
            ids = chance.choices(range(262), k=5)
            body["prompt"] = chance.choice((self.text(), [self.text(), "b"], ids, [ids, ids[:1]]))
        options: dict[str, Any] = {
            "n": chance.choice((1, 2, 5)),
            "temperature": chance.choice((0, 0.7, 2)),
            "seed": chance.randrange(100),
            "top_p": 0.9,
            "top_k": chance.choice((0, 1, 5, 10**9)),
            "stop": chance.choice(("a", ["b", "é"], [])),
            "logit_bias": {"5": -100, "70": 3.5},
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.5,
            "min_tokens": 1,
            "ignore_eos": True,
            "bad_words": ["a"],
            "allowed_token_ids": chance.choice(([70, 71], [1], [97])),
            "priority": chance.randrange(-3, 3),
            "cache_salt": chance.choice(("", "s")),
            "logprobs": True if path == PATHS[0] else chance.randrange(5),
            "user": "u",
        }
        if path == PATHS[1]:
            options["echo"] = True
        for name in chance.sample(sorted(options), chance.randrange(6)):
            body[name] = options[name]
        if chance.random() < 0.4:
            body["stream"] = True
        return body

    def valid(self) -> Attack:
        path = self.chance.choice(PATHS)
        return self.request("valid", path, self.body(path))

    def odd_fields(self) -> Attack:
        path = self.chance.choice(PATHS)
        fields = CHAT_FIELDS if path == PATHS[0] else COMPLETION_FIELDS
        names = [each.name for each in fields if each.use is not Use.NO_EFFECT]
        body = self.body(path)
        for _ in range(self.chance.choice((1, 1, 2, 5))):
            name = self.chance.choice([*names, "strange", "\ud800", "a" * 200, "x\r\ny"])
            body[name] = self.chance.choice(ODD)
        return self.request("odd fields", path, body)

    def request(self, name: str, path: str, body: Any) -> Attack:
        return Attack(name, post_bytes(path, json.dumps(body).encode()))

    def broken_json(self) -> Attack:
        path = self.chance.choice(PATHS)
        data = bytearray(json.dumps(self.body(path), ensure_ascii=False).encode(errors="replace"))
        for _ in range(self.chance.choice((1, 3))):
            place = self.chance.randrange(len(data))
            if self.chance.random() < 0.5:
                data[place] = self.chance.randrange(256)
            else:
                del data[place:]
                data += b" "
        return Attack("broken JSON", post_bytes(path, bytes(data)))

    def nested(self) -> Attack:
        depth = self.chance.choice((30, 63, 65, 500, 990, 5000, 100_000))
        opening, closing = self.chance.choice((("[", "]"), ('{"a":', "}")))
        middle = opening * depth + "1" + closing * depth
        name = self.chance.choice(("messages", "stop", "chat_template_kwargs", "x", "prompt"))
        base = '"messages":[{"role":"user","content":"x"}],"max_tokens":1,'
        data = ("{" + (base if name != "messages" else "") + f'"{name}":{middle}' + "}").encode()
        return Attack("nested", post_bytes(self.chance.choice(PATHS), data))

    def bytes_of_json(self) -> Attack:
        data = self.chance.choice(
            (
                b"",
                b"null",
                b"[]",
                b'"x"',
                b"\xff\xfe",
                b"\x00" * 50,
                b"{" * 50,
                b"NaN",
                b'{"a":NaN}',
            )
        )
        if self.chance.random() < 0.3:
            data = self.chance.randbytes(self.chance.randrange(200))
        return Attack("other bytes", post_bytes(self.chance.choice(PATHS), data))

    def odd_http(self) -> Attack:
        path = self.chance.choice(PATHS)
        data = self.chance.choice(
            (
                b"GET " + path.encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /%00/../../etc/passwd?x=%ff HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET  / HTTP/1.1\r\n\r\n",
                b"\x16\x03\x01\x00\xa5\x01\x00\r\n\r\n",
                b"POST " + path.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
                b"POST " + path.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
                b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
                b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\n\r\n",
                b"GET /v1/models/" + b"%F0%9F" * 20 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\xfe\r\n\r\n" * 3,
            )
        )
        return Attack("odd HTTP", data)

    def huge(self) -> Attack:
        path = self.chance.choice(PATHS)
        size = self.chance.choice((MAX_BODY // 2, MAX_BODY - 40, MAX_BODY + 1, 3 * MAX_BODY))
        text = self.chance.choice(("a", " ", "[],", '\\"')) * size
        quoted = json.dumps({"prompt": text[:size], "messages": text[:9]}).encode()
        return Attack("huge", post_bytes(path, quoted))

    def stalled(self) -> Attack:
        whole = self.valid().data
        cut = self.chance.randrange(len(whole))
        return Attack("stalled", whole[:cut], pause_s=3 * max(HEADER_S, BODY_S))

    def headers(self) -> Attack:
        data = self.valid().data
        extra = self.chance.choice(
            (
                b"Content-Encoding: gzip\r\n",
                b"Expect: 100-continue\r\n",
                b"Authorization: Bearer \xff\r\n",
                b"X-Request-Id: a\tb\r\n",
                b"Origin: null\r\nAccess-Control-Request-Method: POST\r\n",
                b"Connection: close\r\n",
                b"X: " + b"y" * 5000 + b"\r\n",
            )
        )
        return Attack("headers", data.replace(b"\r\n", b"\r\n" + extra, 1))

    def left(self) -> Attack:
        path = self.chance.choice(PATHS[:2])
        body = self.body(path) | {
            "n": self.chance.choice((1, 3, 8)),
            "max_tokens": 100,
            "stream": self.chance.random() < 0.6,
        }
        data = post_bytes(path, json.dumps(body).encode())
        stage = self.chance.choice((0.0, 0.01, 0.05, 0.3))
        return Attack("left", data, leaves_after_s=stage, is_reset=self.chance.random() < 0.5)


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
    ends = body.count(b"data: [DONE]\n\n")
    if b'data: {"error"' in body:
        is_ours = b'"type":"server_error"' in body
        return f"error in stream {500 if is_ours else 400}" if ends == 0 else "5: DONE after error"
    return f"{status} stream" if ends == 1 else f"5: {ends} times DONE"


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
    parser.add_argument("--json", default="-", metavar="FILE")
    options = parser.parse_args()
    found = Findings()
    logging.getLogger("pagedmlx").addHandler(FaultLog(found))
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_folder(Path(folder) / "tiny", max_model_len=512)
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
