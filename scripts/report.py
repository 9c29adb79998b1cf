"""What scripts share: a report as JSON with machine and versions, a word on how far they are."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# Some scripts import this module by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.bench.surroundings import surroundings
from pagedmlx.cli.results import check_writable, write_whole
from pagedmlx.errors import PagedMLXError


def add_json_option(parser: argparse.ArgumentParser, **settings: Any) -> None:
    """Let ``--json`` name where the report goes; refused at once where it can't be written.

    Args:
        parser: Gets the option, which is required if it has no default.
        settings: As for ``add_argument``, to have it otherwise.
    """
    settings = {"required": "default" not in settings, "help": "report; - is stdout"} | settings
    parser.add_argument("--json", metavar="FILE", type=writable, **settings)


def writable(text: str) -> str:
    """An option's file, or ``-``; for ``add_argument``, which tells what is wrong with it."""
    try:
        if text != "-":
            check_writable(Path(text))
    except PagedMLXError as error:
        raise argparse.ArgumentTypeError(f"{error}: {error.hint}") from error
    return text


def save(report: dict[str, Any], target: str) -> None:
    """Write a report as JSON, whole or not at all.

    Args:
        report: What the script found; machine and versions are added.
        target: A file, or ``-`` for standard output.
    """
    write(json.dumps(surroundings() | report, indent=2, ensure_ascii=False) + "\n", target)


def write(text: str, target: str) -> None:
    """Write a file, whole or not at all; ``-`` is standard output."""
    if target == "-":
        sys.stdout.write(text)
    else:
        write_whole(Path(target), text)


def save_so_far(report: dict[str, Any], target: str) -> None:
    """The same, should the rest never end; standard output gets the whole report only."""
    if target != "-":
        save(report, target)


def note(line: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between."""
    return [int(number) for number in text.split(",")]
