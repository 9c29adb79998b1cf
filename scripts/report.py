"""What scripts share: a report as JSON with machine and versions, a word on how far they are."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

# Some scripts import this module by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.bench.surroundings import surroundings


def save(report: dict[str, Any], target: str) -> None:
    """Write a report as JSON, whole or not at all.

    Args:
        report: What the script found; machine and versions are added.
        target: A file, or ``-`` for standard output.
    """
    text = json.dumps(surroundings() | report, indent=2, ensure_ascii=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    path = Path(target)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a pipe or a device must stay what it is
        return
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    Path(file.name).replace(path)


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
