"""``pagedmlx rm``: deletes a model from its cache."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pagedmlx.cli import render
from pagedmlx.errors import readable_bytes


def rm(
    model: Annotated[str, typer.Argument(help="A name that pagedmlx ls shows.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Delete a model from its cache; other programs may use that cache too."""
    from pagedmlx import hub

    if not yes and sys.stdin.isatty() and not typer.confirm(f"Delete {model}?", err=True):
        raise typer.Exit(1)
    freed = hub.remove(model)
    if as_json:
        render.json_line({"name": model, "freed_bytes": freed})
    else:
        render.text(f"{model} is gone; {readable_bytes(freed)} freed")
