"""Whatever a client sends is answered with a 4xx in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import gzip
import json
import re
import socket
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from tests.support.engines import make_engine
from tests.support.server import WAIT_S, RunningServer, serving
from tests.support.tokenizers import SPECIAL_TOKENS

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


def post(server: RunningServer, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    answer = server.post("/v1/chat/completions", body, headers)
    assert answer.headers["content-type"] == "application/json"
    error = answer.error
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status, error


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 65, 1.5, "2", True]),
        ("temperature", [-0.1, 101, "hot", True, 10**400, []]),
        ("top_p", [0, 1.1, "x"]),
        ("top_k", [-2, 0.5, 10**400 * -1]),
        ("min_p", [-1, 2]),
        ("seed", ["x", 1.5, 2**70]),
        ("max_tokens", [0, -1, 1.5, "5", True]),
        ("max_completion_tokens", [0, "5"]),
        ("min_tokens", [-1, 3, "x"]),
        ("repetition_penalty", [0, 1e-300, -1, 101]),
        ("presence_penalty", [-2.5, 3, "x"]),
        ("frequency_penalty", [-2.5, 10**400]),
        ("logit_bias", [[1], {"x": 1}, {"1": 101}, {"99999": 1}, {"1": "x"}, 5]),
        ("allowed_token_ids", [[], [99999], "x", [-1]]),
        ("bad_words", [[""], [1], 5]),
        ("stop", [1, [1], ["a"] * 65, {}]),
        ("stop_token_ids", [[-1], ["x"], 10**6, [10**30]]),
        ("logprobs", [1, "yes"]),
        ("top_logprobs", [5]),
        ("prompt_logprobs", [21, -1, "x"]),
        ("stream", ["true", 1]),
        ("stream_options", [{}, {"include_usage": True}]),
        ("priority", ["x", 1.5, 2**40]),
        ("cache_salt", [5, {}]),
        ("chat_template_kwargs", [5, {"messages": []}, {"tokenize": True}]),
        ("ignore_eos", ["x", 1]),
        ("skip_special_tokens", [0]),
        ("model", [5, []]),
        ("messages", [[], "x", 5, [5], {}]),
        ("tools", [[{"type": "function"}], "x"]),
        ("tool_choice", ["required", {"type": "function"}]),
        ("response_format", [{"type": "json_object"}, {"type": "json_schema"}, "x"]),
        ("best_of", [2, True]),
        ("reasoning_effort", ["a lot", 5]),
        ("guided_json", [{}]),
        ("logits_processors", [["x"]]),
    ],
)
def test_a_value_that_is_off_is_refused_with_its_field(
    server: RunningServer, field: str, values: list[Any]
):
    for value in values:
        limit = {} if field == "max_completion_tokens" else {"max_tokens": 2}
        status, error = post(server, {"messages": CHAT["messages"], **limit, field: value})
        assert (status, error["type"]) == (400, "invalid_request_error"), value
        assert re.split(r"[.\[]", error["param"])[0] == field, (value, error)
        assert len(error["message"]) < 700


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (None, "messages[0].content"),
        (5, "messages[0].content"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages[0].content[0].type"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ("a\ud800", "messages"),
    ],
)
def test_content_that_is_no_text_is_refused_by_its_place(
    server: RunningServer, content: Any, param: str
):
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": content}], "stream": stream}
        status, error = post(server, body)
        assert (status, error["param"]) == (400, param)


def test_roles_that_nobody_knows_are_refused(server: RunningServer):
    status, error = post(server, {"messages": [{"role": "banana", "content": "x"}]})
    assert (status, error["param"]) == (400, "messages[0].role")


@pytest.mark.parametrize("spelling", SPECIAL_TOKENS)
def test_control_tokens_in_a_message_are_plain_text(server: RunningServer, spelling: str):
    count = server.chat(f"a{spelling}b", max_tokens=1).json["usage"]["prompt_tokens"]
    plain = server.chat("ab", max_tokens=1).json["usage"]["prompt_tokens"]
    assert count == plain + len(spelling.encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ""},
        {"stop": [""]},
        {"stop": []},
        {"stop": ["", "zz"]},
        {"max_tokens": 10**12},
        {"max_tokens": 10**30},
        {"top_k": 10**30},
        {"seed": -(2**63)},
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "none"},
        {"logit_bias": {"5": 1, "6": -100}},
        {"max_tokens": 3, "max_completion_tokens": 3},
        {"user": {"any": "thing"}, "metadata": {}, "store": True, "service_tier": "auto"},
        {"model": None},
        {"model": "owner/tiny"},
        {"model": "tiny"},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
        {"messages": [{"role": "developer", "content": "a"}, {"role": "assistant", "content": ""}]},
    ],
)
def test_what_can_be_served_is_served(server: RunningServer, fields: dict[str, Any]):
    assert server.post("/v1/chat/completions", {**CHAT, **fields}).status == 200


def test_two_names_for_the_limit_must_agree(server: RunningServer):
    _, error = post(server, {**CHAT, "max_tokens": 3, "max_completion_tokens": 4})
    assert error["param"] == "max_tokens"


@pytest.mark.parametrize("name", ["gpt-4", "../x", "owner/tiny2", ""])
def test_another_model_is_not_found(server: RunningServer, name: str):
    status, error = post(server, {**CHAT, "model": name})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_the_context_limit_is_told_with_the_counts():
    with serving(lambda: make_engine(num_blocks=128, max_model_len=256)) as server:
        assert server.complete("x" * 255, max_tokens=1).json["usage"]["completion_tokens"] == 1
        assert server.complete("x" * 250, max_tokens=50).json["usage"]["completion_tokens"] == 6
        for length in (256, 257, 5000):
            for stream in (False, True):
                answer = server.complete("x" * length, max_tokens=1, stream=stream)
                assert answer.status == 400
                assert answer.error["code"] == "context_length_exceeded"
                assert answer.error["param"] == "prompt"
                assert str(length) in answer.error["message"]
                assert "256" in answer.error["message"]
        assert server.chat("x" * 300).error["param"] == "messages"


def test_unknown_fields_are_named_in_a_header_or_refused(server: RunningServer):
    strange = {"frob": 1, "tëst\r\nX-Evil: 1": 2, "a" * 100: 3}
    answer = server.post("/v1/chat/completions", {**CHAT, **strange})
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "frob, ?, ?")
    with serving(strict=True) as strict:
        status, error = post(strict, {**CHAT, "frob": 1})
        assert (status, error["param"]) == (400, "frob")
        assert strict.post("/v1/chat/completions", CHAT).status == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b" \n", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'"x"', 400),
        (b"5", 400),
        (b"null", 400),
        (b"\xff\xfe{}", 400),
        (b'{"n": NaN}', 400),
        (b'{"n": Infinity}', 400),
        (b'{"n": ' + b"9" * 5000 + b"}", 400),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (b'{"messages": ' + b"[" * 100 + b"]" * 100 + b"}", 400),
        (b'{"\\ud800": 1}', 400),
        (b'{"cache_salt": "\\udfff", "messages": []}', 400),
    ],
)
def test_a_body_that_is_no_object_is_refused(server: RunningServer, body: bytes, status: int):
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        answer = server.post(path, body)
        assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")


def test_other_content_types_are_refused(server: RunningServer):
    data = json.dumps(CHAT).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert post(server, data, **{"Content-Type": kind})[0] == 415
    zipped = gzip.compress(data)
    assert post(server, zipped, **{"Content-Encoding": "gzip"})[0] == 415
    fine = server.post("/v1/chat/completions", data, {"Content-Type": "application/json; a=b"})
    assert fine.status == 200


def test_a_body_beyond_the_limit_is_refused_however_it_is_sent():
    with serving(max_body_bytes=1000) as server:
        data = b'{"prompt": "' + b"x" * 2000 + b'"}'
        assert server.post("/v1/completions", data).status == 413
        connection = server.connect()
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        connection.send(b"7d0\r\n" + b"x" * 2000 + b"\r\n")
        assert connection.getresponse().status == 413
        connection.close()
        assert server.complete(max_tokens=1).status == 200


def exchange(server: RunningServer, data: bytes) -> bytes:
    (answer,) = exchange_at_once(server, data)
    return answer


def exchange_at_once(server: RunningServer, *all_data: bytes) -> list[bytes]:
    """What comes back until the server closes, each on a connection of its own."""
    with ExitStack() as stack:
        connections: list[socket.socket] = []
        for data in all_data:
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
            connections.append(stack.enter_context(connection))
            connection.sendall(data)
        return [b"".join(iter(partial(each.recv, 65536), b"")) for each in connections]


def test_a_head_that_never_comes_is_given_up():
    # Time enough for the one head that does come.
    with serving(header_timeout_s=1.5) as server:
        whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        begun = b"POST /v1/completions HTTP/1.1\r\nHost"
        *never, second = exchange_at_once(server, b"", begun, whole + b"GET /health")
        for answer in never:
            assert answer.startswith(b"HTTP/1.1 408")
        assert second.startswith(b"HTTP/1.1 200")
        assert second.count(b"HTTP/1.1 ") == 2
        server.assert_idle()


def test_a_body_that_never_comes_is_given_up():
    with serving(header_timeout_s=1.5, body_timeout_s=0.2) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        answer = exchange(server, head + b"Content-Length: 100\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body_timeout" in answer
        server.assert_idle()


def test_what_is_no_http_gets_a_json_error(server: RunningServer):
    for data in (b"\x16\x03\x01\r\n\r\n", b"GET  / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
        answer = exchange(server, data)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b'"code":"invalid_http"' in answer


def test_a_request_that_turns_out_to_be_no_http_is_cut_off_without_a_fault(
    server: RunningServer, caplog: pytest.LogCaptureFixture
):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    for kind in (b"", b"Content-Type: application/json\r\n"):
        assert exchange(server, head + kind + b"\r\nzz\r\n").startswith(b"HTTP/1.1 4")
    assert "failed" not in caplog.text


def send_for_long(connection: socket.socket) -> None:
    for _ in range(int(WAIT_S / 0.01)):
        connection.sendall(b"x" * 1000)
        time.sleep(0.01)


def test_a_body_that_goes_on_after_its_answer_is_cut_off():
    with serving(header_timeout_s=0.2, max_body_bytes=10) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100000000\r\n\r\n"
            )
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                send_for_long(connection)
        assert server.get("/health").status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("HEAD", "/v1/completions", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("PUT", "/health", 405),
        ("POST", "/v1/completions/", 404),
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/nothing", 404),
    ],
)
def test_paths_and_methods_that_are_not_there_are_told(
    server: RunningServer, method: str, path: str, status: int
):
    answer = server.send(method, path)
    assert answer.status == status
    assert method == "HEAD" or answer.error["type"] in ("not_found_error", "invalid_request_error")
    if status == 405:
        assert answer.headers["allow"]
