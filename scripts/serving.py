"""What the scripts about the server share: a server in a process of its own, and a bare client.

The client speaks HTTP by hand, so that it can break off at any byte.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
START_S = 120.0


@dataclass(frozen=True)
class ServerProcess:
    port: int
    pid: int

    def get(self, path: str) -> Any:
        """The JSON, or else the text, at a path."""
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            data = answer.read()
        return json.loads(data) if "json" in answer.headers["content-type"] else data.decode()

    def rss_bytes(self) -> int:
        """Memory that the process holds now."""
        command = ["ps", "-o", "rss=", "-p", str(self.pid)]
        return (
            int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024
        )


@contextmanager
def server_process(model: Path | str, *flags: str) -> Iterator[ServerProcess]:
    """Run ``pagedmlx serve``; its log goes to stderr only if it fails."""
    command = [sys.executable, "-m", "pagedmlx", "serve", str(model), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [*command, "--no-log-requests", *flags],
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment,
        # A terminal's Ctrl-C is for the script, which then ends the server.
        start_new_session=True,
    )
    log = ""
    try:
        log, port = _read_until_ready(process)
        yield ServerProcess(port, process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            _, rest = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            _, rest = process.communicate()
        if process.returncode != 128 + signal.SIGINT:
            sys.stderr.write(log + rest)


def _read_until_ready(process: subprocess.Popen[str]) -> tuple[str, int]:
    """Its log up to the line that tells the port, and the port."""
    assert process.stderr is not None
    log = ""
    limit = threading.Timer(START_S, process.kill)
    limit.start()
    try:
        for line in process.stderr:
            log += line
            if found := re.search(r"serving .*:(\d+)/", line):
                return log, int(found[1])
    finally:
        limit.cancel()
    raise SystemExit(f"the server didn't start\n{log}")


def post_bytes(path: str, body: bytes) -> bytes:
    """A whole request."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer.

    Raises:
        ConnectionError: There is none.
    """
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("no answer came") from error
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
    return int(head[0].split()[1]), headers


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The parts of an answer's body as they come.

    Raises:
        ConnectionError: It ends too early.
    """
    try:
        if "content-length" in headers:
            yield await reader.readexactly(int(headers["content-length"]))
            return
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the answer broke off") from error


async def read_events(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[Any]:
    """The events of a stream: JSON, the text ``[DONE]``, or None for a comment."""
    held = b""
    async for part in read_body(reader, headers):
        held += part
        *events, held = held.split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: "):
                yield None
            elif event == b"data: [DONE]":
                yield "[DONE]"
            else:
                yield json.loads(event.removeprefix(b"data: "))


def percentiles(seconds: list[float]) -> dict[str, float] | None:
    """In milliseconds."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {
        f"p{share}": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 2)
        for share in (50, 90, 99)
    } | {"max": round(1000 * ordered[-1], 2)}
