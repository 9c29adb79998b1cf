"""The requests that ``fuzz_server.py`` sends: valid, odd, broken, hostile, broken off."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagedmlx.server.agent_fields import MESSAGE_FIELDS, RESPONSE_FIELDS
from pagedmlx.server.embeddings import EMBEDDING_FIELDS
from pagedmlx.server.field import Use
from pagedmlx.server.fields import CHAT_FIELDS, COMPLETION_FIELDS
from scripts.fuzz_agents import AGENT_PATHS, AgentMaker
from scripts.serving import post_bytes

HEADER_S = BODY_S = 1.0
MAX_BODY = 1 << 20

EMBEDDINGS = "/v1/embeddings"
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    *AGENT_PATHS,
    EMBEDDINGS,
)
FIELDS = {
    PATHS[0]: CHAT_FIELDS,
    AGENT_PATHS[0]: RESPONSE_FIELDS,
    AGENT_PATHS[1]: MESSAGE_FIELDS,
    AGENT_PATHS[2]: MESSAGE_FIELDS,
    EMBEDDINGS: EMBEDDING_FIELDS,
}
NESTED = (
    *("messages", "stop", "chat_template_kwargs", "x", "prompt", "input", "tools", "system"),
    *("text", "output_config", "response_format", "structured_outputs", "metadata"),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, 2**31, 2**63, 2**64, 10**30, -(10**30)),
    *("", "a", "\ud800", "\x00", "é" * 50, "<|end|>", "<|assistant|>", "{{ 7*7 }}", "{% raw %}"),
    *([], [[]], {}, {"a": {}}, [None], ["a"] * 70, [1] * 70, [2**40], {"1": 1}, {"-1": 5}),
    *({"type": "json_object"}, {"include_usage": 5}, [{"role": "user"}], ["", "b"], "none"),
)
ROLES = ("user", "assistant", "system", "developer", "tool", "banana", None, 5)


@dataclass(frozen=True)
class Attack:
    """Bytes to send, with pauses, and how the client behaves."""

    name: str
    data: bytes
    pause_s: float = 0.0
    leaves_after_s: float | None = None
    is_reset: bool = False


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
        if path in AGENT_PATHS:
            return AgentMaker(chance, self.text).body(path)
        if path == EMBEDDINGS:
            return self.embedding_body()
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
        else:
            options |= AgentMaker(chance, self.text).chat_options()
        for name in chance.sample(sorted(options), chance.randrange(6)):
            body[name] = options[name]
        if chance.random() < 0.4:
            body["stream"] = True
        return body

    def embedding_body(self) -> dict[str, Any]:
        chance = self.chance
        ids = chance.choices(range(262), k=5)
        many = [self.text() + "a" for _ in range(chance.choice((1, 3, 40)))]
        body: dict[str, Any] = {"input": chance.choice((self.text(), many, ids, [ids, ids[:1]]))}
        options = {
            "encoding_format": chance.choice(("float", "base64")),
            "dimensions": chance.choice((1, 7, 32)),
            "priority": chance.randrange(-3, 3),
            "cache_salt": chance.choice(("", "s")),
            "user": "u",
        }
        names = chance.sample(sorted(options), chance.randrange(4))
        return body | {name: options[name] for name in names}

    def valid(self) -> Attack:
        path = self.chance.choice(PATHS)
        return self.request("valid", path, self.body(path))

    def odd_fields(self) -> Attack:
        path = self.chance.choice(PATHS)
        fields = FIELDS.get(path, COMPLETION_FIELDS)
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
        name = self.chance.choice(NESTED)
        base = '"messages":[{"role":"user","content":"x"}],"max_tokens":1,"input":"x",'
        data = (
            "{" + (base if name not in ("messages", "input") else "") + f'"{name}":{middle}' + "}"
        ).encode()
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
                b"DELETE /v1/responses/resp_1 HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /v1/responses/%F0%9F/input_items HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /v1/models/" + b"%F0%9F" * 20 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\xfe\r\n\r\n" * 3,
            )
        )
        return Attack("odd HTTP", data)

    def huge(self) -> Attack:
        path = self.chance.choice(PATHS)
        size = self.chance.choice((MAX_BODY // 2, MAX_BODY - 40, MAX_BODY + 1, 3 * MAX_BODY))
        text = self.chance.choice(("a", " ", "[],", '\\"')) * size
        quoted = json.dumps({"prompt": text[:size], "messages": text[:9], "input": text}).encode()
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
        path = self.chance.choice((*PATHS[:2], *AGENT_PATHS[:2], EMBEDDINGS))
        body = self.body(path)
        if path == EMBEDDINGS:
            body["input"] = [self.text() + "a"] * self.chance.choice((5, 100, 300))
        else:
            limit = "max_output_tokens" if path == AGENT_PATHS[0] else "max_tokens"
            body |= {limit: 100, "stream": self.chance.random() < 0.6}
        if path in PATHS[:2]:
            body["n"] = self.chance.choice((1, 3, 8))
        data = post_bytes(path, json.dumps(body).encode())
        stage = self.chance.choice((0.0, 0.01, 0.05, 0.3))
        return Attack("left", data, leaves_after_s=stage, is_reset=self.chance.random() < 0.5)
