"""``pagedmlx chat`` as a command: pipes, terminals, and how it ends."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagedmlx.chat.demo import OTHER
from tests.cli.conftest import REPOSITORY, Cli
from tests.test_project import run_python

ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
SHOW_CURSOR = b"\x1b[?25h"


def test_a_pipe_gets_the_answer_and_nothing_else(cli: Cli) -> None:
    result = cli("chat", "--demo", stdin=b"hello\n")
    assert result.code == 0
    assert result.out == OTHER + "\n"
    assert "written beforehand" in result.err


def test_run_is_another_name_that_help_does_not_show(cli: Cli) -> None:
    assert cli("run", "--demo", "--plain", stdin=b"hello\n").out == OTHER + "\n"
    shown = cli("--help").out
    assert "chat " in shown
    assert "run " not in shown.split("Commands:")[1]


def test_wrong_uses_are_named(cli: Cli) -> None:
    result = cli("chat", "smollm2", "--demo")
    assert (result.code, "needs neither a model" in result.err) == (2, True)
    result = cli("chat", "--plain", "no-such-model", stdin=b"hello\n")
    assert (result.code, "no-such-model" in result.err) == (1, True)
    result = cli("chat", "--plain", "--url", "http://127.0.0.1:1", stdin=b"hello\n")
    assert (result.code, "doesn't answer" in result.err) == (1, True)
    result = cli("chat", "--demo", "--max-tokens", "-1", stdin=b"hello\n")
    assert (result.code, "--max-tokens: -1" in result.err) == (2, True)


def test_input_that_is_no_text_is_told(cli: Cli) -> None:
    result = cli("chat", "--demo", stdin=b"hello \xff\n")
    assert (result.code, "not UTF-8" in result.err) == (2, True)


def test_neither_help_nor_a_pipe_loads_the_screen() -> None:
    code = (
        "import io, sys\n"
        "from pagedmlx.cli.app import run\n"
        "run(['chat', '--help'])\n"
        "heavy = {'mlx', 'textual', 'httpx2'} & set(sys.modules)\n"
        "sys.stdin = io.StringIO('hello\\n')\n"
        "run(['chat', '--demo', '--plain'])\n"
        "print('LOADED', sorted(heavy | ({'mlx', 'textual', 'httpx2'} & set(sys.modules))))\n"
    )
    assert run_python("-c", code).strip().endswith("LOADED []")


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.seen = b""
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagedmlx", "chat", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=REPOSITORY,
            env={
                **os.environ,
                "TERM": "xterm-256color",
                "LINES": "30",
                "COLUMNS": "100",
                "XDG_DATA_HOME": str(home),
            },
        )
        os.close(slave)

    def until(self, text: bytes, limit_s: float = 60.0) -> None:
        """Read until a text has come."""
        ends_s = time.monotonic() + limit_s
        while text not in self.seen:
            assert time.monotonic() < ends_s, self.seen[-2000:]
            self._read(0.1)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        """Read until the program has ended; its exit code."""
        while self.process.poll() is None:
            if not self._read(0.05):
                time.sleep(0.01)
        # What it wrote last is still on its way, in more than one piece perhaps.
        while self._read(30.0):
            pass
        os.close(self._master)
        return self.process.returncode

    def _read(self, wait_s: float) -> bool:
        """Read a piece if one comes in time; False too when nobody can write any more."""
        if not select.select([self._master], [], [], wait_s)[0]:
            return False
        try:
            part = os.read(self._master, 65536)
        except OSError:
            part = b""
        self.seen += part
        return bool(part)


@pytest.mark.parametrize("ending", ["quit", "SIGINT", "SIGTERM", "SIGHUP"])
def test_leaving_in_the_middle_of_an_answer_gives_the_terminal_back(
    ending: str, tmp_path: Path
) -> None:
    terminal = Terminal(tmp_path, "--demo")
    terminal.until(ENTER_SCREEN)
    terminal.until(b"Sunlight")
    if ending == "quit":
        terminal.type(b"\x11")
    else:
        terminal.process.send_signal(getattr(signal, ending))
    code = terminal.end()
    assert code == (0 if ending == "quit" else 128 + getattr(signal, ending))
    assert LEAVE_SCREEN in terminal.seen
    assert terminal.seen.rindex(SHOW_CURSOR) > terminal.seen.rindex(b"\x1b[?25l")
    assert b"Traceback" not in terminal.seen
