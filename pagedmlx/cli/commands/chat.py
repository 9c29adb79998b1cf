"""``pagedmlx chat``: a chat in the terminal, or line by line where there is only a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedmlx.cli import render
from pagedmlx.cli.options import (
    ENGINE_FLAGS,
    MODEL_FLAG,
    SAMPLING_FLAGS,
    FlagGroup,
    given_fields,
    with_flags,
)
from pagedmlx.config import EngineConfig
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import InvalidRequestError

if TYPE_CHECKING:
    from pagedmlx.chat.client import ChatClient


def _longest(value: str | int) -> int | None:
    """The value of --max-tokens; 0 is no limit of ours."""
    try:
        return int(value) or None
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is not a whole number") from error


# A conversation is no test of a model: it should not repeat itself, nor stop in the middle.
_CHANGES: dict[str, dict[str, Any]] = {
    "temperature": {"default": 0.7},
    "max_tokens": {
        "help": "Most tokens of an answer; 0 is as many as fit.",
        "default": 0,
        "parser": _longest,
        "metavar": "N",
    },
}
_MODEL = replace(MODEL_FLAG, help="Model to talk to, instead of the argument.")
_SAMPLING = tuple(replace(flag, **_CHANGES.get(flag.field, {})) for flag in SAMPLING_FLAGS)

CHAT_FLAGS = (_MODEL, *ENGINE_FLAGS, *_SAMPLING)


def with_chat_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of the engine and of sampling."""
    groups = (
        FlagGroup("config", EngineConfig, ENGINE_FLAGS),
        FlagGroup("params", SamplingParams, _SAMPLING),
    )
    return with_flags(command, groups, _MODEL)


def chat(
    ctx: typer.Context,
    config: EngineConfig,
    params: SamplingParams,
    model_flag: str | None,
    model: Annotated[str | None, typer.Argument(help="Model; a list unless given.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to this OpenAI endpoint instead.", metavar="URL")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key for --url; else OPENAI_API_KEY.", metavar="KEY")
    ] = None,
    system: Annotated[
        str, typer.Option(help="System message of new conversations.", metavar="TEXT")
    ] = "",
    plain: Annotated[
        bool, typer.Option("--plain", help="Line by line, as in a pipe; no screen.")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="Keep no conversation.")] = False,
    demo: Annotated[bool, typer.Option("--demo", help="Play a scene without a model.")] = False,
) -> None:
    """Talk to a model, in several conversations at once, and see the memory that they share.

    Without a model there is a list to choose from. In a pipe, each line is a message; a backslash
    at its end goes on in the next line.
    """
    name = model or model_flag
    if demo and (name or url):
        raise InvalidRequestError("--demo", "needs neither a model nor --url", hint="drop one")

    def make_client(wanted: str) -> ChatClient:
        if demo:
            from pagedmlx.chat.demo import DemoClient

            return DemoClient()
        if url is not None:
            from pagedmlx.chat.http_client import HttpClient

            return HttpClient(url, wanted, api_key or os.environ.get("OPENAI_API_KEY", ""))
        from pagedmlx.chat.engine_client import EngineClient

        return EngineClient(replace(config, model=wanted))

    given = given_fields(ctx)
    if plain or not _has_screen():
        from pagedmlx.chat.plain import PlainOutput, run_plain

        with render.meter() as meter:
            output = PlainOutput(
                answer=_answer,
                notice=render.notice,
                progress=meter.stage,
                started=meter.stop,
                is_patient=sys.stdin.isatty(),
            )
            fallback = "" if url is not None or demo else EngineConfig().model
            client = make_client(name or fallback)
            ended = run_plain(client, _lines(), output, params=params, given=given, system=system)
        _leave(0, ended=ended)
        return
    from pagedmlx.chat.options import ChatOptions
    from pagedmlx.chat.run import run_app
    from pagedmlx.chat.scene import play
    from pagedmlx.chat.store import default_path

    options = ChatOptions(
        make_client=make_client,
        model=name if name or not (demo or url) else "",
        store_path=None if private or demo else default_path(),
        params=params,
        given=given,
        system=system,
        can_pick=url is None and not demo,
        scene=play if demo else None,
    )
    code, ended, problem = run_app(options)
    if problem:
        render.error(problem)
    _leave(code, ended=ended)


def _has_screen() -> bool:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return is_terminal and os.environ.get("TERM", "dumb") != "dumb"


def _lines() -> Iterator[str]:
    asks = sys.stdin.isatty()
    while True:
        if asks:
            render.text("> ", end="")
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                "prompt", f"stdin is not UTF-8 at byte {error.start + 1}"
            ) from error
        if not line:
            return
        yield line.rstrip("\r\n")


def _answer(piece: str) -> None:
    render.text(piece, end="")


def _leave(code: int, *, ended: bool) -> None:
    if not ended:
        # The engine's thread may be deep in MLX, or a download in its threads.
        render.flush()
        os._exit(code)
    if code:
        raise typer.Exit(code)
