"""A server on a real socket, in a thread of this process, and a small HTTP client for it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

from pagedmlx.engine.engine import Engine
from pagedmlx.engine.worker import EngineWorker
from pagedmlx.server.run import listen, run_server
from pagedmlx.server.service import Service
from pagedmlx.server.settings import ServerSettings
from tests.support.engines import assert_idle, make_engine

WAIT_S = 60.0
MODEL = "owner/tiny"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events; the last one is the text ``[DONE]``."""
        lines = [line for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [
            line if line == "[DONE]" else json.loads(line)
            for line in (line.removeprefix("data: ") for line in lines)
        ]


@dataclass
class RunningServer:
    port: int
    service: Service
    worker: EngineWorker
    stop: Callable[[float], None]
    thread: threading.Thread
    failures: list[BaseException] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request on a connection of its own; ``body`` is sent as JSON unless it is bytes."""
        connection = self.connect()
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            given = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, data, {**given, **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, dict(response.headers.items()), response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        return self.send("POST", path, body, headers)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return self.send("GET", path, headers=headers)

    def chat(self, content: Any = "hello", **fields: Any) -> Answer:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def complete(self, prompt: Any = "hello", **fields: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "it didn't come true"
            time.sleep(0.005)

    def num_steps(self) -> int:
        return self.get("/v1/stats").json["engine"]["num_steps"]

    def assert_idle(self) -> None:
        """Wait until nothing runs, then look at every record and every block."""
        engine = self.worker.engine

        def look() -> bool:
            # On the engine's thread: a request of a client that left early may still come in.
            if engine.has_unfinished or self.worker._subscribers:
                return False
            assert_idle(engine)
            return True

        self.wait_until(
            lambda: self.service.num_generations == 0 and self.worker.call(look).result()
        )


@contextmanager
def serving(
    build: Callable[[], Engine] = make_engine,
    *,
    wait: bool = True,
    send_buffer_bytes: int | None = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """Serve an engine until the context ends; ``send_buffer_bytes`` is the system's, of each."""
    chosen = ServerSettings(**{"port": 0, **settings})
    sockets = listen(chosen)
    if send_buffer_bytes is not None:
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    service = Service(MODEL, chosen)
    worker = EngineWorker(lambda _report: build())
    begun: list[Callable[[float], None]] = []
    is_begun = threading.Event()
    failures: list[BaseException] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        stop: asyncio.Future[float] = loop.create_future()

        def ask(drain_s: float) -> None:
            if not stop.done():
                stop.set_result(drain_s)

        begun.append(lambda drain_s: loop.call_soon_threadsafe(ask, drain_s) and None)
        is_begun.set()
        await run_server(service, worker, sockets, stop=stop)

    def body() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failures.append(error)

    port = sockets[0].getsockname()[1]
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert is_begun.wait(WAIT_S)
    server = RunningServer(port, service, worker, begun[0], thread, failures)
    try:
        if wait:
            server.wait_until(lambda: service.engine is not None or bool(failures))
        yield server
    finally:
        if thread.is_alive():
            server.stop(0.0)
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the server didn't stop"
    if wait:
        assert not failures, failures
