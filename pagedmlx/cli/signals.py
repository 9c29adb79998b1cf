"""Ctrl-C and SIGTERM: first an orderly end, then, if that takes too long, any end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from pagedmlx.cli import render

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM

# A step or the loading of a model can't be stopped in the middle; nobody should wait for it.
_GRACE_S = 1.5


class Terminated(BaseException):
    """SIGTERM came; not an Exception, so that nothing on the way swallows it."""


@contextmanager
def signals_raise() -> Iterator[None]:
    """Within the context SIGINT raises KeyboardInterrupt and SIGTERM raises Terminated.

    The process ends at the latest 1.5 seconds later, and at once when a second signal comes.
    """
    timers: list[threading.Timer] = []

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        code = 128 + number
        if timers:
            end_at_once(code)
        timers.append(end_later(code))
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for timer in timers:
            timer.cancel()


def end_later(code: int, after_s: float = _GRACE_S) -> threading.Timer:
    """End the process with an exit code after some time, unless the timer is cancelled."""
    timer = threading.Timer(after_s, end_at_once, [code])
    timer.daemon = True
    timer.start()
    return timer


def end_at_once(code: int) -> NoReturn:
    """End the process with an exit code, whatever it is doing."""
    render.restore_terminal()
    os._exit(code)
