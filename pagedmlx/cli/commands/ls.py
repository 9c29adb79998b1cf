"""``pagedmlx ls``: the models on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedmlx.cli import render
from pagedmlx.errors import readable_bytes


def ls(as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False) -> None:
    """List the models that are on this machine."""
    from pagedmlx import hub

    models = hub.list_models()
    if as_json:
        render.json_document(
            [
                {
                    "name": model.name,
                    "kind": model.kind,
                    "size_bytes": model.size_bytes,
                    "path": str(model.path),
                    "removable": model.removable,
                }
                for model in models
            ]
        )
    elif models:
        rows = [(m.name, m.kind, readable_bytes(m.size_bytes), str(m.path)) for m in models]
        render.table([("NAME", "KIND", "SIZE", "PATH"), *rows])
    else:
        render.notice(f"no models yet; pagedmlx pull {hub.EMBEDDED_MODEL} brings a small one")
