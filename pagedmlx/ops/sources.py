"""Where the kernels' sources are, and how one becomes the text that a compiler gets."""

from __future__ import annotations

import re
from pathlib import Path

from pagedmlx.errors import PagedMLXError

# Tells our folder from any other that happens to be called metal beside site-packages.
_MARKER = "README.md"


def kernel_folder() -> Path:
    """Folder that holds the kernels' Metal sources and the contract that they keep.

    Raises:
        PagedMLXError: Neither the package nor a checkout around it has the folder.
    """
    package = Path(__file__).resolve().parents[1]
    folders = (package / "metal", package.parent / "metal")
    for folder in folders:
        if (folder / _MARKER).is_file():
            return folder
    raise PagedMLXError(
        f"the kernels' folder is missing: neither {folders[0]} nor {folders[1]}",
        hint="install pagedmlx again",
    )


def read_source(name: str) -> str:
    """A file of the kernels' folder without comments and indentation.

    MLX puts a kernel's text together and hashes it at every call, and looks in it for the names
    of thread attributes, so what is there for readers only is left out.

    Args:
        name: File name within the folder.
    """
    text = (kernel_folder() / name).read_text(encoding="utf-8")
    lines = (re.sub(r"//.*", "", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"
