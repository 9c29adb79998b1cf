"""Clients leave, queues fill, engines die, servers stop: blocks come back and nobody hangs."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest

from pagedmlx.core.step import Step
from pagedmlx.errors import ModelLoadError
from pagedmlx.server.run import PortError, listen
from pagedmlx.server.settings import ServerSettings
from tests.support.engines import BeforeStep, FakeRunner, make_engine
from tests.support.server import WAIT_S, RunningServer, serving

BUSY = {"max_tokens": 400, "ignore_eos": True}


def slowly(_step: Step) -> None:
    # Long requests must still run when a busy machine gets round to what a test does next.
    time.sleep(0.02)


def slow_engine(before_step: BeforeStep = slowly, **settings: Any) -> Any:
    return make_engine(FakeRunner(before_step=before_step), **{"num_blocks": 256, **settings})


class Brake:
    """Makes an engine slow until it is released."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self.release = self._released.set

    def __call__(self, _step: Step) -> None:
        self._released.wait(0.1)


def begin(server: RunningServer, **fields: Any) -> socket.socket:
    """Send a completion request; the caller reads what comes, or goes."""
    body = json.dumps({"prompt": "hello there", **BUSY, **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    return connection


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        part = connection.recv(65536)
        assert part, data
        data += part
    return data


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
        if b"\r\n0\r\n\r\n" in data:
            break
    return data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_its_blocks(stream: bool, n: int):
    with serving(slow_engine) as server:
        for stage in range(4):
            connections = [begin(server, n=n, stream=stream) for _ in range(3)]
            if stage:
                server.wait_until(lambda: bool(server.get("/v1/stats").json["requests"]))
            if stage > 1 and stream:
                read_until(connections[0], b"data: ")
            if stage > 2:
                steps = server.num_steps()
                server.wait_until(lambda steps=steps: server.num_steps() > steps + 2)
            for connection in connections:
                connection.close()
            server.assert_idle()
        assert server.complete(max_tokens=1).status == 200


@pytest.mark.parametrize("ahead", [b"\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_client_that_has_sent_more_is_missed_all_the_same(ahead: bytes):
    with serving(slow_engine) as server:
        connection = begin(server)
        server.wait_until(lambda: bool(server.get("/v1/stats").json["requests"]))
        for each in (ahead, ahead):
            connection.sendall(each)
            steps = server.num_steps()
            server.wait_until(lambda steps=steps: server.num_steps() > steps + 2)
        connection.close()
        server.assert_idle()
        stats = server.get("/v1/stats").json["engine"]
        assert stats["num_output_tokens"] < BUSY["max_tokens"]


def test_a_request_sent_ahead_is_answered_in_its_turn():
    with serving() as server, begin(server, max_tokens=20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = read_until(connection, b'"ready"')
        assert data.count(b"HTTP/1.1 200") == 2
        assert data.index(b"text_completion") < data.index(b'"ready"')


def test_a_client_may_leave_while_it_waits_for_blocks():
    brake = Brake()
    with serving(lambda: slow_engine(brake, num_blocks=64), keep_alive_s=0.02) as server:
        first = begin(server, prompt="x" * 100, max_tokens=140, stream=True)
        read_until(first, b"data: ")
        second = begin(server, prompt="y" * 200, max_tokens=40, stream=True)
        data = read_until(second, b": keep-alive")
        while data.count(b": keep-alive") < 3:
            data += second.recv(65536)
        assert data.startswith(b"HTTP/1.1 200")
        assert b"data:" not in data
        requests = server.get("/v1/stats").json["requests"]
        assert {each["state"] for each in requests} == {"waiting", "decode"}
        # They have the names that their answers have.
        assert all(each["request_id"].startswith("cmpl-") for each in requests)
        second.close()
        server.wait_until(lambda: len(server.get("/v1/stats").json["requests"]) == 1)
        brake.release()
        assert read_all(first).count(b"[DONE]") == 1
        first.close()
        server.assert_idle()


def test_a_full_queue_says_so_before_any_stream():
    with serving(lambda: slow_engine(max_num_seqs=1, max_num_waiting=1)) as server:
        first = begin(server, stream=True)
        read_until(first, b"data: ")
        second = begin(server, stream=True)
        server.wait_until(lambda: len(server.get("/v1/stats").json["requests"]) == 2)
        for stream in (False, True):
            answer = server.complete(stream=stream)
            assert (answer.status, answer.error["code"]) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
        first.close()
        second.close()
        server.assert_idle()


def test_a_request_that_takes_too_long_is_ended():
    with serving(slow_engine, request_timeout_s=0.3) as server:
        answer = server.complete(**BUSY)
        assert (answer.status, answer.error["code"]) == (504, "request_timeout")
        events = server.complete(**BUSY, stream=True).events
        assert events[-1]["error"]["code"] == "request_timeout"
        assert "[DONE]" not in events
        server.assert_idle()


def test_a_client_that_never_reads_is_given_up():
    def build() -> Any:
        return make_engine(num_blocks=4096, max_model_len=16000, check_integrity=False)

    with serving(build, send_timeout_s=0.3, send_buffer_bytes=4096) as s:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(WAIT_S)
        connection.connect(("127.0.0.1", s.port))
        body = json.dumps({"prompt": "x", "max_tokens": 15000, "n": 8, "stream": True}).encode()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        # It has begun, and that is the last which this client takes.
        assert connection.recv(9) == b"HTTP/1.1 "
        s.assert_idle()
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_is_told_to_everyone(stream: bool):
    num_steps = 0

    def die(_step: Step) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 20:
            raise MemoryError("out of it")
        time.sleep(0.002)

    with serving(lambda: make_engine(FakeRunner(before_step=die), num_blocks=256)) as server:
        answer = server.complete(**BUSY, stream=stream)
        if stream:
            assert answer.status == 200
            assert answer.events[-1]["error"]["type"] == "server_error"
            assert "[DONE]" not in answer.events
        else:
            assert (answer.status, answer.error["type"]) == (503, "server_error")
        assert (server.get("/health").status, server.get("/ready").status) == (503, 503)
        again = server.complete()
        assert (again.status, again.error["code"]) == (503, "server_dead")
        assert server.get("/v1/stats").json["status"] == "dead"
        assert b"pagedmlx:engine_up 0.0" in server.get("/metrics").body


def test_a_request_that_fails_by_its_own_settings_fails_alone():
    from tests.support.engines import LETTERS

    def choose(sequence: Any) -> int:
        # As the sampler does when nothing is left.
        return -1 if sequence.request.params.allowed_token_ids else LETTERS[0]

    with serving(lambda: make_engine(FakeRunner(choose, slowly), num_blocks=256)) as server:
        other = begin(server, max_tokens=60, stream=True)
        read_until(other, b"data: ")
        answer = server.complete(allowed_token_ids=[10], stream=False)
        assert (answer.status, answer.error["code"]) == (400, "no_token_left")
        events = server.complete(allowed_token_ids=[10], stream=True).events
        assert events[-1]["error"]["code"] == "no_token_left"
        assert b"[DONE]" in read_all(other)
        other.close()
        server.assert_idle()


def test_clients_are_told_while_the_model_loads():
    go = threading.Event()

    def build() -> Any:
        assert go.wait(WAIT_S)
        return make_engine()

    with serving(build, wait=False) as server:
        for path in ("/health", "/ready"):
            assert (server.get(path).status, server.get(path).json) == (503, {"status": "loading"})
        answer = server.complete()
        assert (answer.status, answer.error["code"]) == (503, "server_loading")
        assert answer.headers["retry-after"]
        assert server.get("/v1/models").status == server.get("/metrics").status == 200
        go.set()
        server.wait_until(lambda: server.get("/ready").status == 200)
        assert server.complete(max_tokens=1).status == 200


def test_a_model_that_cannot_be_loaded_ends_the_server():
    def build() -> Any:
        raise ModelLoadError("no such thing")

    with serving(build, wait=False) as server:
        server.thread.join(WAIT_S)
        (failure,) = server.failures
        assert isinstance(failure, ModelLoadError)


def test_a_draining_server_finishes_what_runs_and_takes_nothing_new():
    brake = Brake()
    with serving(lambda: slow_engine(brake)) as server:
        running = begin(server, max_tokens=60, stream=True)
        read_until(running, b"data: ")
        server.stop(WAIT_S)
        server.wait_until(lambda: server.get("/ready").status == 503)
        assert server.get("/health").status == 200
        answer = server.complete()
        assert (answer.status, answer.error["code"]) == (503, "server_draining")
        brake.release()
        assert b"[DONE]" in read_all(running)
        running.close()
        server.thread.join(WAIT_S)
        assert not server.thread.is_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_must_stop_now_tells_its_clients(stream: bool):
    with serving(slow_engine) as server:
        running = begin(server, stream=stream)
        server.wait_until(lambda: bool(server.get("/v1/stats").json["requests"]))
        data = read_until(running, b"data: ") if stream else b""
        server.stop(0.0)
        while part := running.recv(65536):
            data += part
        assert b'"code":"server_stopping"' in data
        assert b"[DONE]" not in data
        assert data.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
        running.close()
        server.thread.join(WAIT_S)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))


def test_a_port_that_is_taken_is_told():
    (first,) = listen(ServerSettings(port=0))
    with first, pytest.raises(PortError, match=f"port {first.getsockname()[1]}"):
        listen(ServerSettings(port=first.getsockname()[1]))
    for host in ("203.0.113.1", "no such host", "x" * 300):
        with pytest.raises(PortError):
            listen(ServerSettings(host=host, port=0))
