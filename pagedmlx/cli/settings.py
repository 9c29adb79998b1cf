"""The config file: where it is and what is in it; what its keys mean is options.py's."""

from __future__ import annotations

import os
from pathlib import Path

from pagedmlx.errors import InvalidRequestError


def config_file() -> Path:
    """``$XDG_CONFIG_HOME/pagedmlx/config.toml`` or ``~/.config/pagedmlx/config.toml``."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.config"))
    return root / "pagedmlx" / "config.toml"


def read_config_file() -> dict[str, object]:
    """The file's keys and values; empty when there is no file.

    Raises:
        InvalidRequestError: It can't be read or is not TOML.
    """
    path = config_file()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(str(path), f"can't be read: {error}") from error
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(
            str(path), f"is not TOML: {error}", hint="one flag a line, such as num-blocks = 512"
        ) from error
