"""Everything that commands print: data to stdout, notices to stderr. Nothing else prints.

Text goes out as it is, never through markup; a terminal is kept safe from control characters.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pagedmlx.progress import ProgressCallback
from pagedmlx.text.visible import visible

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def text(value: str, *, end: str = "\n") -> None:
    """Write text to stdout at once."""
    if sys.stdout.isatty():
        value = visible(value)
    print(value, end=end, flush=True)


def json_line(value: object) -> None:
    """Write one value as one line of JSON to stdout at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def json_document(value: object) -> None:
    """Write one value as indented JSON to stdout."""
    print(json.dumps(value, ensure_ascii=False, indent=2), flush=True)


def notice(value: str) -> None:
    """Write one line to stderr."""
    print(visible(value) if sys.stderr.isatty() else value, file=sys.stderr, flush=True)


def once_each() -> Callable[[str], None]:
    """A notice that passes over what it has said before."""
    told: set[str] = set()

    def tell(value: str) -> None:
        if value not in told:
            told.add(value)
            notice(value)

    return tell


def error(message: str, hint: str = "") -> None:
    """Write what went wrong, and what to do about it, to stderr: one line each."""
    notice("error: " + " ".join(message.split()))
    if hint:
        notice("hint: " + " ".join(hint.split()))


def table(rows: Sequence[Sequence[str]]) -> None:
    """Write rows of text to stdout in aligned columns; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        text("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def grid(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Write a title and rows of numbers to stdout; the first row is the heading, all of it text."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    text(title)
    if not rows:
        return
    # Lines that a pipe's reader need not know.
    shape = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False)
    for place, name in enumerate(rows[0]):
        shape.add_column(Text(name), justify="right" if place else "left", no_wrap=True)
    for row in rows[1:]:
        shape.add_row(*map(Text, row))
    width = (
        None if sys.stdout.isatty() else sum(max(map(len, c)) + 2 for c in zip(*rows, strict=True))
    )
    Console(file=sys.stdout, width=width).print(shape)


def pairs(values: Mapping[str, str]) -> None:
    """Write names and values to stdout, one pair a line."""
    width = max(map(len, values), default=0)
    for name, value in values.items():
        text(f"{name.ljust(width)}  {value}")


class Meter:
    """A line on stderr that shows how far something is; silent when stderr is no terminal."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress, self._task = progress, task

    def stage(self, name: str, fraction: float | None = None) -> None:
        """Show a stage and, when it is known, the part done (0 to 1)."""
        total = None if fraction is None else 1.0
        self._update(description=name, total=total, completed=fraction or 0.0)

    def count(self, name: str, done: int, total: int | None) -> None:
        """Show how many of ``total`` are done."""
        self._update(description=f"{name} {done}/{total or '?'}", total=total, completed=done)

    def stop(self) -> None:
        """Take the line away."""
        if self._progress is not None:
            self._progress.stop()

    def _update(self, description: str, **fields: Any) -> None:
        if self._progress is not None and self._task is not None:
            from rich.markup import escape

            self._progress.update(self._task, description=escape(description), **fields)


@contextmanager
def meter(*, shown: bool = True) -> Iterator[Meter]:
    """Show a progress line for as long as the context lasts."""
    if not (shown and sys.stderr.isatty()):
        yield Meter(None, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Meter(progress, progress.add_task("", total=None))


@contextmanager
def download(*, shown: bool = True) -> Iterator[ProgressCallback]:
    """Tell each stage of a download once, and its progress; say what an interrupt has left."""
    tell = once_each()
    began = False

    with meter(shown=shown) as line:

        def show(stage: str, share: float | None) -> None:
            nonlocal began
            began = True
            if shown:
                tell(stage)
                line.stage("", share)

        try:
            yield show
        except BaseException as problem:
            line.stop()
            if shown and began and not isinstance(problem, Exception):
                notice("stopped; run it again, what has arrived is kept")
            raise


def prepare_streams() -> None:
    """Make characters that an output can't encode visible instead of fatal."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def flush() -> None:
    """Write out what is buffered, as far as it can be written."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def restore_terminal() -> None:
    """Show the cursor that a progress line has hidden, when there is no time to end it."""
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\r\x1b[K\x1b[?25h")


def discard_stdout() -> None:
    """After the reader of stdout has gone, keep Python's own flush at exit quiet."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return
