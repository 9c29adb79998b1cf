"""Turns outputs into rows and keeps the file of rows: appended as they come, resumed, repaired."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedmlx.errors import InvalidRequestError, PagedMLXError

if TYPE_CHECKING:
    from pagedmlx.engine.outputs import PositionLogprobs, RequestOutput, TokenLogprob

Row = dict[str, Any]


def output_row(output: RequestOutput) -> Row:
    """The row of a finished request; an error's row when it was refused or failed.

    Log probabilities are in it if the request asked for them: one entry for each token, and None
    for a prompt's first one. JSON has no infinity, so an impossible token's is None.
    """
    if output.error is not None:
        return error_row(output.request_id, output.error)
    metrics = output.metrics
    row = {
        "id": output.request_id,
        "outputs": [
            {
                "index": choice.index,
                "text": choice.text,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "num_tokens": len(choice.token_ids),
                **_logprobs("logprobs", choice.logprobs),
            }
            for choice in output.outputs
        ],
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "metrics": asdict(metrics) if metrics is not None else None,
    }
    return row | _logprobs("prompt_logprobs", output.prompt_logprobs)


def _logprobs(key: str, positions: Sequence[PositionLogprobs | None] | None) -> Row:
    if positions is None:
        return {}
    return {key: [None if each is None else _position(each) for each in positions]}


def _position(position: PositionLogprobs) -> Row:
    return {**_token(position.token), "top": [_token(token) for token in position.top]}


def _token(token: TokenLogprob) -> Row:
    return {
        "token_id": token.token_id,
        "text": token.text,
        "logprob": token.logprob if isfinite(token.logprob) else None,
        "rank": token.rank,
    }


def error_row(row_id: str, error: Exception) -> Row:
    """The row of a request that has no output."""
    detail = {"type": type(error).__name__, "message": str(error)}
    hint = getattr(error, "hint", "")
    return {"id": row_id, "error": {**detail, "hint": hint} if hint else detail}


@contextmanager
def row_file(path: Path) -> Iterator[Callable[[Row], None]]:
    """Open a file for appending; each row is one whole line and is with the system at once."""
    with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:

        def write(row: Row) -> None:
            # One write a row: an interrupt between two leaves no half line.
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

        yield write


def check_new(path: Path) -> None:
    """Refuse to write over a file that has something in it, or where none can be written.

    Raises:
        InvalidRequestError: It is not empty, or is a folder.
        PagedMLXError: Its folder can't be written.
    """
    if path.is_dir():
        raise InvalidRequestError("--output", f"{path} is a folder", hint="name a file")
    if path.is_file() and path.stat().st_size:
        raise InvalidRequestError(
            "--output", f"{path} is there already", hint="--resume goes on with it"
        )
    check_writable(path)


def resume_rows(path: Path) -> set[str]:
    """Make a file of rows ready to go on with.

    Complete rows stay; errors, which are to be tried again, and a torn last line are dropped. The
    file is written anew under another name and renamed, so that it is whole at any time.

    Returns:
        Ids of the rows that stay.

    Raises:
        InvalidRequestError: A line in the middle is no row of ours, or it is no file at all.
        PagedMLXError: Its folder can't be written.
    """
    path = path.resolve()
    check_writable(path)
    if not path.exists():
        return set()
    if not path.is_file():
        # Renaming over a device or a pipe would put a file in its place.
        raise InvalidRequestError("--resume", f"{path} is not a regular file")
    done: set[str] = set()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "wb") as new, open(path, "rb") as old:
            for number, line in enumerate(old, 1):
                row = _row(line)
                if row is None and line.endswith(b"\n"):
                    raise InvalidRequestError(
                        "--resume", f"{path} line {number} is not a row of this command"
                    )
                if row is not None and "error" not in row and row["id"] not in done:
                    done.add(row["id"])
                    new.write(line if line.endswith(b"\n") else line + b"\n")
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return done


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        return None
    # A file of prompts has ids too.
    return row if "outputs" in row or "error" in row else None


def write_whole(path: Path, content: str) -> None:
    """Write a file, whole or not at all; what is no file, such as a pipe, is written to."""
    if path.exists() and not path.is_file():
        path.write_text(content, encoding="utf-8")
        return
    path = path.resolve()
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(content, encoding="utf-8")
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Refuse a file that can't be written, before any work is done for it.

    Raises:
        PagedMLXError: It is a folder, or its folder is not there, or the system wouldn't let us.
    """
    if path.is_dir():
        raise PagedMLXError(f"{path} is a folder", hint="name a file")
    if not path.parent.is_dir():
        raise PagedMLXError(f"{path.parent} is not a folder", hint="make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PagedMLXError(f"{path} can't be written", hint="check permissions")
