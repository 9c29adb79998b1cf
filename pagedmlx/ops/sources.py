"""Where the kernels' sources are: in the installed package, or in the checkout it runs from."""

from __future__ import annotations

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
