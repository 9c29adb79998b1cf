"""``pagedmlx ps``: what a running server is doing."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from pagedmlx.cli import render
from pagedmlx.errors import InvalidRequestError, PagedMLXError

_TIMEOUT_S = 10.0


def ps(
    url: Annotated[
        str, typer.Option(help="Where the server is.", metavar="URL")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="A key of the server.", metavar="KEY")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Show the requests, the queue and the blocks of a running server."""
    found = _read(url, api_key)
    if as_json:
        render.json_document(found)
        return
    engine = found.get("engine")
    if engine is None:
        render.text(f"{found['model']}  {found['status']}")
        return
    render.text(
        f"{found['model']}  {found['status']}  "
        f"blocks: {engine['num_used_blocks']} of {engine['num_blocks']} used, "
        f"{engine['num_cached_blocks']} cached  "
        f"sequences: {engine['num_running']} running, {engine['num_waiting']} waiting"
    )
    if found["requests"]:
        render.table([_HEADING, *map(_row, found["requests"])])


_HEADING = ("REQUEST", "STATE", "AGE", "PROMPT", "CACHED", "OUTPUT", "BLOCKS", "PREEMPTED")


def _row(request: dict[str, Any]) -> tuple[str, ...]:
    return (
        request["request_id"],
        request["state"],
        f"{request['age_s']:.1f}s",
        str(request["num_prompt_tokens"]),
        str(request["num_cached_tokens"]),
        str(request["num_output_tokens"]),
        str(request["num_blocks"]),
        str(request["num_preemptions"]),
    )


def _read(url: str, api_key: str | None) -> dict[str, Any]:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, Request, build_opener

    if not url.startswith(("http://", "https://")):
        raise InvalidRequestError("url", f"{url!r} is no URL", hint="such as http://127.0.0.1:8000")
    base = url.rstrip("/").removesuffix("/v1")
    request = Request(f"{base}/v1/stats")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        # A proxy is for the world outside.
        with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT_S) as answer:
            found = json.load(answer)
    except HTTPError as error:
        hint = "--api-key KEY, or PAGEDMLX_API_KEY" if error.code == 401 else ""
        raise PagedMLXError(f"{base} answers with status {error.code}", hint=hint) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise PagedMLXError(
            f"no server answers at {base}: {reason}", hint="pagedmlx serve starts one; --url"
        ) from error
    if not isinstance(found, dict) or not {"model", "status"} <= found.keys():
        raise PagedMLXError(f"what answers at {base} is no pagedmlx server")
    return found
