"""The clipboard of a Mac that the user sits at; other terminals are told by Textual."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys


def put(text: str) -> None:
    """Put a text into the clipboard; Terminal.app doesn't let programs reach it otherwise."""
    if sys.platform == "darwin" and "SSH_TTY" not in os.environ:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["pbcopy"], input=text.encode(), timeout=1.0, check=False)
