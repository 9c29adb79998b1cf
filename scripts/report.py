"""What every report of a script carries, and how it is saved: machine, versions, JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("pagedmlx", "mlx", "mlx-lm", "numpy", "transformers", "tokenizers")


def surroundings() -> dict[str, Any]:
    """The machine and the versions of what ran on it."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": platform.system(),
            "release": platform.release(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        },
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES},
    }


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


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
