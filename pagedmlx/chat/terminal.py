"""Terminal: output and signals, such that a terminal that is gone or stands still stops nobody."""

from __future__ import annotations

import errno
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from textual.app import App
from textual.drivers.linux_driver import LinuxDriver

_GRACE_S = 5.0
"""An orderly end takes two; a terminal that takes no more output may hold it up for ever."""


class Terminal(LinuxDriver):
    """Textual's driver, whose thread that writes outlives the terminal.

    Without that thread the application waits for ever for room in its queue.
    """

    def __init__(
        self,
        app: App[object],
        *,
        debug: bool = False,
        mouse: bool = True,
        size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        self._file = Output(self._file)  # type: ignore[assignment]


class Output(io.TextIOBase):
    """Writes to a terminal while there is one; that it is gone is told by SIGHUP, once.

    Args:
        file: The terminal.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_gone = False

    def write(self, text: str, /) -> int:
        """Write, or not."""
        self._try(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        """Write what is held back, or not."""
        self._try(self._file.flush)

    def fileno(self) -> int:
        """The terminal's file."""
        return self._file.fileno()

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            # The kernel tells only those whose own terminal it was.
            if error.errno == errno.EIO and not self._is_gone:
                self._is_gone = True
                os.kill(os.getpid(), signal.SIGHUP)


@contextmanager
def signals_leave(leave: Callable[[int], None], grace_s: float = _GRACE_S) -> Iterator[None]:
    """Within the context SIGINT, SIGTERM and SIGHUP leave, and end the process if that hangs.

    Args:
        leave: Called on the main thread with the exit code, between any two of its steps.
        grace_s: After so long the process ends, whatever it is doing.
    """
    timers: list[threading.Timer] = []

    def stop(number: int, frame: FrameType | None) -> None:
        code = 128 + number
        if not timers:
            timers.append(threading.Timer(grace_s, os._exit, [code]))
            timers[0].daemon = True
            timers[0].start()
        leave(code)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for timer in timers:
            timer.cancel()
