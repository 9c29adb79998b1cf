"""``pagedmlx serve``: OpenAI's API over one model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pagedmlx.cli import render
from pagedmlx.config import EngineConfig
from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.settings import ServerSettings


def serve(
    ctx: typer.Context,
    settings: ServerSettings,
    config: EngineConfig,
    model_flag: str | None,
    model: Annotated[str | None, typer.Argument(help="Model; smollm2 unless given.")] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with keys that open the server, one a line.", metavar="FILE"),
    ] = None,
) -> None:
    """Serve a model to any OpenAI client, many at once.

    Every flag can be set in the environment as PAGEDMLX_<FLAG>, and in the config file by its name.
    SIGTERM lets requests finish first; Ctrl-C ends within two seconds, a second one at once.
    """
    config = replace(config, model=model or model_flag or EngineConfig().model)
    settings = replace(
        settings,
        api_keys=(*settings.api_keys, *_keys_of(api_key_file)),
        served_model_names=tuple(settings.served_model_names),
        cors_origins=tuple(settings.cors_origins),
    )
    if not settings.is_local and not settings.api_keys:
        render.notice(
            f"WARNING: anyone who reaches {settings.host} can use this server: there is no API key;"
            " --api-key or --api-key-file sets one, --host 127.0.0.1 keeps it to this machine"
        )
    _log_to_stderr()
    from pagedmlx.cli.serving import run

    run(config, settings)


def _keys_of(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError("api_key_file", f"{file} can't be read: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        # Open to everyone is not what somebody wants who names a file of keys.
        raise InvalidRequestError("api_key_file", f"{file} has no key")
    return keys


class _Notices(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        render.notice(self.format(record))


def _log_to_stderr() -> None:
    handler = _Notices()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("pagedmlx")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    # What clients do wrong is no news; faults of ours are logged by us.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
