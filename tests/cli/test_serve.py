"""``pagedmlx serve`` and ``pagedmlx ps`` as processes: ports, keys, signals, exit codes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.conftest import REPOSITORY, Cli
from tests.support.engines import make_engine
from tests.support.server import serving

# A server over the fake engine: its first answer takes as long as a test wants.
WITH_FAKE_ENGINE = """
import sys, time
import pagedmlx.engine.load as load
import pagedmlx.hub as hub
from tests.support.engines import FakeRunner, make_engine
hub.resolve = lambda *_: None
load.load_engine = lambda config, report: (
    report("loading", None),
    time.sleep(600 if "slow" in config.model else 0),
    make_engine(FakeRunner(before_step=lambda step: time.sleep(0.05)), num_blocks=256),
)[-1]
from pagedmlx.cli.app import main
main()
"""
WAIT_S = 120.0
Serve = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:

        def begin(*arguments: str) -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", WITH_FAKE_ENGINE, "serve", *arguments],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=REPOSITORY,
                    env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                )
            )
            stack.callback(process.kill)
            return process

        yield begin


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    """Read stderr up to a line with these words."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if words in line:
            return line
    raise AssertionError(seen)


def port_of(process: subprocess.Popen[str]) -> int:
    return int(wait_for(process, "serving ").rpartition(":")[2].partition("/")[0])


def stream_from(port: int, max_tokens: int = 400) -> socket.socket:
    body = b'{"prompt": "x", "max_tokens": %d, "stream": true}' % max_tokens
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    data = b""
    while b"data: " not in data:
        part = connection.recv(4096)
        assert part, data
        data += part
    return connection


def test_a_taken_port_is_told_before_anything_is_loaded(serve: Serve):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = serve("slow", "--port", str(taken.getsockname()[1]))
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert f"port {taken_port(err)}" in err
    assert "hint:" in err
    assert "loading" not in err
    assert "Traceback" not in err


def taken_port(err: str) -> str:
    return err.partition("port ")[2].partition(":")[0]


def test_settings_that_are_off_are_wrong_uses(cli: Cli, tmp_path: Path):
    empty = tmp_path / "keys"
    empty.write_text("\n# none\n")
    for arguments, name in (
        (("--port", "70000"), "--port"),
        (("--port", "x"), "--port"),
        (("--host", ""), "--host"),
        (("--body-timeout", "0"), "--body-timeout"),
        (("--api-key", "a b"), "--api-key"),
        (("--api-key-file", empty), "--api-key-file"),
        (("--api-key-file", tmp_path / "none"), "--api-key-file"),
        (("--block-size", "5"), "--block-size"),
        (("--temp", "1"), "--temp"),
    ):
        result = cli("serve", *arguments)
        assert result.code == 2
        assert name in result.err


def test_a_model_that_is_not_there_is_one_line(serve: Serve, tmp_path: Path):
    process = subprocess.run(
        [sys.executable, "-m", "pagedmlx", "serve", str(tmp_path / "no"), "--port", "0"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert process.returncode == 1
    assert process.stderr.startswith("error: ")
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(
    ("host", "warns", "number", "code"),
    [("127.0.0.1", False, signal.SIGINT, 130), ("0.0.0.0", True, signal.SIGTERM, 143)],
)
def test_an_open_server_without_a_key_warns_and_a_signal_ends_it(
    serve: Serve, host: str, warns: bool, number: int, code: int
):
    process = serve("m", "--port", "0", "--host", host)
    first = wait_for(process, "WARNING" if warns else "loading")
    assert ("no API key" in first) is warns
    port = port_of(process)
    process.send_signal(number)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == code
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_sigterm_lets_streams_finish_and_ctrl_c_does_not(serve: Serve):
    for number, code, max_tokens, end in (
        (signal.SIGTERM, 143, 40, b"[DONE]"),
        (signal.SIGINT, 130, 400, b"server_stopping"),
    ):
        process = serve("m", "--port", "0")
        with stream_from(port_of(process), max_tokens) as connection:
            process.send_signal(number)
            data = b""
            while part := connection.recv(65536):
                data += part
        assert end in data
        process.communicate(timeout=WAIT_S)
        assert process.returncode == code


def test_a_second_signal_ends_at_once(serve: Serve):
    process = serve("m", "--port", "0")
    port = port_of(process)
    with stream_from(port):
        process.send_signal(signal.SIGTERM)
        while urllib_status(port, "/ready") == 200:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 130


def test_ctrl_c_ends_a_server_that_still_loads(serve: Serve):
    process = serve("slow", "--port", "0")
    wait_for(process, "loading")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 130


def urllib_status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_ps_shows_what_a_server_does(cli: Cli):
    with serving(lambda: make_engine(), api_keys=("k",)) as server:
        result = cli("ps", "--url", f"{server.url}/v1", "--api-key", "k")
        assert result.code == 0
        assert "tiny  ready  blocks: 0 of 64 used" in result.out
        assert '"num_blocks": 64' in cli("ps", "--url", server.url, "--api-key", "k", "--json").out
        refused = cli("ps", "--url", server.url)
        assert refused.code == 1
        assert "401" in refused.err
        assert "--api-key" in refused.err
    gone = cli("ps", "--url", server.url)
    assert gone.code == 1
    assert "no server answers" in gone.err
    assert cli("ps", "--url", "ftp://x").code == 2


def test_the_config_file_serves_both_commands(cli: Cli, config_file: Path):
    config_file.write_text("temp = 0.5\nport = 70000\n")
    result = cli("serve")
    assert result.code == 2
    assert "port in the config file" in result.err
    config_file.write_text("nonsense = 1\n")
    assert "nonsense" in cli("serve").err
