"""``pagedmlx pull``: brings a model to this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedmlx.cli import render


def pull(
    model: Annotated[str, typer.Argument(help="smollm2 or a Hugging Face id.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit.", metavar="REVISION")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Fetch a model, or bring it up to date."""
    from pagedmlx import hub

    with render.download() as show:
        found = hub.pull(model, show, revision=revision)
    if as_json:
        render.json_line({"name": found.name, "kind": found.kind, "path": str(found.path)})
    else:
        render.text(f"{found.name} is here: {found.path}")
