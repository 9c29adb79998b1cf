"""A terminal that is closed, stands still, or is told to end leaves no process and no mess."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
WAIT_S = 60.0

CHAT = """
import sys
from pathlib import Path
from pagedmlx.chat.demo import DemoClient
from pagedmlx.chat.options import ChatOptions
from pagedmlx.chat.run import run_app
from pagedmlx.chat.scene import play
options = ChatOptions(lambda _: DemoClient(), "", Path(sys.argv[1]), can_pick=False, scene=play)
sys.exit(run_app(options)[0])
"""

STUCK = """
import threading
from pagedmlx.chat.terminal import signals_leave
with signals_leave(lambda code: print("asked", flush=True), 0.05):
    print("here", flush=True)
    threading.Event().wait()
"""


def start(code: str, *arguments: str, terminal: int | None = None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color"}
    given = {"stdin": terminal, "stderr": terminal, "stdout": terminal or subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=environment, start_new_session=True, **given
    )


def read_until(terminal: int, wanted: Callable[[bytes], object]) -> bytes:
    """What a terminal shows until it is as wanted, or is closed."""
    shown = b""
    while not wanted(shown):
        assert select.select([terminal], [], [], WAIT_S)[0], shown
        try:
            shown += os.read(terminal, 2**16)
        except OSError:
            break
    return shown


@pytest.fixture
def chat(tmp_path: Path) -> tuple[int, subprocess.Popen[bytes]]:
    """The scene of the demo on a terminal, as it begins."""
    master, slave = pty.openpty()
    process = start(CHAT, str(tmp_path / "chat.db"), terminal=slave)
    os.close(slave)
    read_until(master, lambda shown: b"for commands" in shown)
    return master, process


def test_a_terminal_that_is_closed_takes_the_chat_with_it(
    chat: tuple[int, subprocess.Popen[bytes]],
) -> None:
    terminal, process = chat
    # No signal comes: it is nobody's own terminal.
    os.close(terminal)
    assert process.wait(WAIT_S) == 128 + signal.SIGHUP


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_in_good_order(
    chat: tuple[int, subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    terminal, process = chat
    process.send_signal(number)
    shown = read_until(terminal, lambda _: False)
    assert process.wait(WAIT_S) == 128 + number
    # The screen from before, a cursor, and no reports of the mouse.
    for end in (b"\x1b[?1049l", b"\x1b[?25h", b"\x1b[?1000l", b"\x1b[?2004l"):
        assert end in shown
    os.close(terminal)


def test_what_hangs_is_ended_all_the_same() -> None:
    process = start(STUCK)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert process.stdout.read() == b"asked\n"
    process.stdout.close()
