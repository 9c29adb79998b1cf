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
            _end(code)
        timer = threading.Timer(_GRACE_S, _end, [code])
        timer.daemon = True
        timers.append(timer)
        timer.start()
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for timer in timers:
            timer.cancel()


def _end(code: int) -> NoReturn:
    render.restore_terminal()
    os._exit(code)
