"""A file of prompts through one engine: read lazily, written as they finish, in bounded memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import typer

from pagedmlx.cli import render
from pagedmlx.cli.model import Wishes, build_prompt, open_llm
from pagedmlx.cli.prompts import BadLine, Prompt, read_prompts
from pagedmlx.cli.results import Row, check_new, error_row, output_row, resume_rows, row_file
from pagedmlx.cli.summary import is_broken, summarize, summary_line, write_summary
from pagedmlx.errors import InvalidRequestError

if TYPE_CHECKING:
    from pagedmlx.engine.outputs import Job
    from pagedmlx.llm import LLM


def run_batch(
    wishes: Wishes, prompts_file: str, *, output: Path | None = None, resume: bool = False
) -> None:
    """Run every prompt of a file.

    Rows go to ``output``, else to stdout; the summary goes to ``stats_json``, else with
    ``as_json`` it is the last line of stdout.

    Args:
        wishes: What is asked for.
        prompts_file: The file's name; ``-`` is stdin.
        output: File that JSON rows are appended to.
        resume: Go on with ``output``: leave out the prompts that it has already.

    Raises:
        InvalidRequestError: A flag or file that can't be used; nothing has been run then.
        typer.Exit: Some prompts failed, or an invariant was broken; the exit code is 1.
    """
    quiet, as_json, stats_json = wishes.quiet, wishes.as_json, wishes.stats_json
    if resume and output is None:
        raise InvalidRequestError("--resume", "needs --output FILE to go on with")
    with ExitStack() as stack:
        lines = stack.enter_context(_open_prompts(prompts_file))
        done: set[str] = set()
        if output is not None and not resume:
            check_new(output)
        elif output is not None:
            done = resume_rows(output)
        llm = stack.enter_context(open_llm(wishes))
        write = _stdout_writer(as_json)
        if output is not None:
            write = stack.enter_context(row_file(output))
        # A bar on the terminal that the rows go to would be torn by them.
        shown = not quiet and (output is not None or not sys.stdout.isatty())
        meter = stack.enter_context(render.meter(shown=shown))
        total = _num_lines(prompts_file)
        left = None if total is None else total - len(done)
        params = wishes.params_for(llm)
        batch = _Batch(llm, write, meter, wishes, total=left)
        try:
            batch.run(read_prompts(lines, name=prompts_file, params=params, done=done))
        except BaseException:
            meter.stop()
            if output is not None and not quiet:
                again = "the same with --resume goes on"
                render.notice(f"stopped after {batch.num_done} prompts are in {output}; {again}")
            raise
        meter.stop()
        summary = summarize(
            llm,
            params,
            num_prompts=batch.num_done,
            num_failed=batch.num_failed,
            num_skipped=len(done),
            wall_s=time.perf_counter() - batch.started,
        )
        if stats_json:
            write_summary(summary, stats_json)
        elif as_json:
            write_summary(summary, "-")
        if not quiet:
            render.notice(summary_line(summary))
    if batch.num_failed or is_broken(summary):
        raise typer.Exit(1)


class _Batch:
    """The prompts on their way: jobs out, rows in."""

    def __init__(
        self,
        llm: LLM,
        write: Callable[[Row], None],
        meter: render.Meter,
        wishes: Wishes,
        *,
        total: int | None,
    ) -> None:
        self.num_done = 0
        self.num_failed = 0
        self.started = time.perf_counter()
        self._llm, self._write, self._meter = llm, write, meter
        self._wishes, self._total = wishes, total
        self._has_template = llm.has_chat_template
        self._lines: dict[str, int] = {}

    def run(self, items: Iterator[Prompt | BadLine]) -> None:
        """Run them all; memory holds only those in flight, and every id."""
        self._meter.count("prompts", 0, self._total)
        for finished in self._llm.generate_iter(self._jobs(items)):
            row = output_row(finished)
            self._finish(row, self._lines.pop(finished.request_id))

    def _jobs(self, items: Iterator[Prompt | BadLine]) -> Iterator[Job]:
        from pagedmlx.engine.outputs import Job

        for item in items:
            try:
                if isinstance(item, BadLine):
                    raise item.error
                fields = build_prompt(item, self._wishes, has_template=self._has_template)
            except InvalidRequestError as error:
                self._finish(error_row(item.id, error), item.line)
                continue
            self._lines[item.id] = item.line
            yield Job(
                request_id=item.id,
                **fields,
                sampling_params=item.params,
                priority=item.priority,
                cache_salt=item.cache_salt,
            )

    def _finish(self, row: Row, line: int) -> None:
        self._write({"id": row["id"], "line": line, **row})
        self.num_done += 1
        self.num_failed += "error" in row
        self._meter.count("prompts", self.num_done, self._total)


def _stdout_writer(as_json: bool) -> Callable[[Row], None]:
    def write_text(row: Row) -> None:
        if "error" in row:
            message = row["error"]["message"]
            place = "" if message.startswith("line ") else f"line {row['line']}: "
            render.error(place + message, row["error"].get("hint", ""))
            return
        for choice in row["outputs"]:
            part = f" ({choice['index'] + 1})" if len(row["outputs"]) > 1 else ""
            render.text(f"--- {row['id']}{part} ---\n{choice['text']}")

    return render.json_line if as_json else write_text


@contextmanager
def _open_prompts(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115 - only opening it is the user's concern here
    except OSError as error:
        raise InvalidRequestError("--prompts-file", f"{name}: {error.strerror}") from error
    with file:
        yield file


def _num_lines(name: str) -> int | None:
    if not Path(name).is_file():
        return None
    with open(name, "rb") as file:
        return sum(1 for line in file if line.strip())
