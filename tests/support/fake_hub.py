"""A Hugging Face hub on this machine with one model, for the real client library to talk to."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

SHA = "a" * 40


class FakeHub:
    """Serves ``owner/model`` from memory while the context lasts.

    Attributes:
        files: Name to content.
        gated: Whether files are refused.
        private: Whether even the model's existence is denied.
        stuck: Files that send their first half and then nothing, until the hub ends.
        broken: Files whose connection ends after the first half.
        slow: Files that trickle.
        fetched: Names of the files that were sent, in order.
        tokens: Authorization headers that came.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.gated = self.private = False
        self.stuck: set[str] = set()
        self.broken: set[str] = set()
        self.slow: set[str] = set()
        self.fetched: list[str] = []
        self.tokens: set[str] = set()
        self.ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, with_body: bool) -> None:
            if token := self.headers.get("Authorization"):
                hub.tokens.add(token)
            path = unquote(urlsplit(self.path).path)
            if hub.private or "owner/model" not in path:
                self._refuse(404, "RepoNotFound")
            elif path.startswith("/api/models/owner/model"):
                self._tell(path.removeprefix("/api/models/owner/model"))
            else:
                _, _, rest = path.partition("/resolve/")
                revision, _, name = rest.partition("/")
                self._file(revision, name, with_body=with_body)

        def _tell(self, rest: str) -> None:
            _, kind, revision = (rest or "/revision/main").split("/", 2)
            if revision not in ("main", "v1", SHA):
                self._refuse(404, "RevisionNotFound")
            elif kind == "tree":
                self._json(
                    [
                        {"type": "file", "path": name, "oid": _etag(data), "size": len(data)}
                        for name, data in hub.files.items()
                    ]
                )
            else:
                siblings = [
                    {"rfilename": name, "size": len(data), "blobId": _etag(data)}
                    for name, data in hub.files.items()
                ]
                self._json({"id": "owner/model", "sha": SHA, "siblings": siblings})

        def _file(self, revision: str, name: str, *, with_body: bool) -> None:
            data = hub.files.get(name)
            if hub.gated:
                self._refuse(403, "GatedRepo")
            elif data is None or revision not in ("main", "v1", SHA):
                self._refuse(404, "EntryNotFound")
            else:
                self.send_response(200)
                self.send_header("ETag", f'"{_etag(data)}"')
                self.send_header("X-Repo-Commit", SHA)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if with_body:
                    self._send(name, data)

        def _send(self, name: str, data: bytes) -> None:
            half = len(data) // 2
            self.wfile.write(data[:half])
            self.wfile.flush()
            if name in hub.stuck | hub.broken:
                while name in hub.stuck and not hub.ended.is_set():
                    time.sleep(0.02)
                self.close_connection = True
                return
            if name in hub.slow:
                for start in range(half, len(data), 200):
                    self.wfile.write(data[start : start + 200])
                    time.sleep(0.1)
                hub.fetched.append(name)
            else:
                # Before its end: then the client may ask for the next one while this thread waits.
                hub.fetched.append(name)
                self.wfile.write(data[half:])

        def _json(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler
