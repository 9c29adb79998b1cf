"""The command line's entry point: finds the command, and turns every error into an exit code.

0 is success, 1 a failure at run time, 2 a wrong use, 130 Ctrl-C and 143 SIGTERM.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from pagedmlx import __version__
from pagedmlx.cli import render
from pagedmlx.cli.commands.bench import bench
from pagedmlx.cli.commands.chat import CHAT_FLAGS, chat, with_chat_flags
from pagedmlx.cli.commands.completion import completion
from pagedmlx.cli.commands.doctor import doctor
from pagedmlx.cli.commands.generate import generate
from pagedmlx.cli.commands.ls import ls
from pagedmlx.cli.commands.ps import ps
from pagedmlx.cli.commands.pull import pull
from pagedmlx.cli.commands.rm import rm
from pagedmlx.cli.commands.serve import serve
from pagedmlx.cli.options import (
    SHARED_FLAGS,
    Flag,
    config_defaults,
    give_variables,
    origin,
    with_engine_and_sampling,
)
from pagedmlx.cli.server_flags import SERVE_FLAGS, with_engine_and_server
from pagedmlx.cli.settings import read_config_file
from pagedmlx.cli.signals import EXIT_INTERRUPTED, EXIT_TERMINATED, Terminated, signals_raise
from pagedmlx.errors import InvalidRequestError, PagedMLXError


@dataclass(slots=True)
class Session:
    """What one run of the command line knows before its command starts."""

    debug: bool = False


# Plain help: rich's would cost a quarter of the time that help may take.
app = typer.Typer(
    name="pagedmlx",
    help="Run language models with a KV cache that is paged like memory.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(value: bool) -> None:
    if value:
        render.text(f"pagedmlx {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    ctx: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="PAGEDMLX_DEBUG", help="Show tracebacks.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    ctx.ensure_object(Session).debug |= debug
    if ctx.invoked_subcommand is None:
        render.text(ctx.get_help())
    elif ctx.invoked_subcommand in _CONFIGURED:
        commands = getattr(ctx.command, "commands")  # noqa: B009 - of typer's groups
        name = ctx.invoked_subcommand
        others = [commands[each] for each in _CONFIGURED if each != name]
        values = config_defaults(read_config_file(), commands[name], others, _CONFIGURED[name])
        ctx.default_map = {name: values}


# The commands that read the config file, with what is known of their flags.
_CONFIGURED: Mapping[str, tuple[Flag, ...]] = {
    "chat": CHAT_FLAGS,
    "run": CHAT_FLAGS,
    "generate": SHARED_FLAGS,
    "serve": SERVE_FLAGS,
}

app.command()(with_chat_flags(chat))
# What others call it.
app.command("run", hidden=True)(with_chat_flags(chat))
app.command()(with_engine_and_sampling(generate))
app.command()(with_engine_and_server(serve))
app.add_typer(bench)
for _command in (ps, pull, ls, rm, doctor, completion):
    app.command()(_command)


def command_line() -> Any:
    """The commands with all their flags, as click knows them."""
    command = typer.main.get_command(app)
    give_variables(command)
    return command


def run(arguments: Iterable[str]) -> int:
    """Run one command line; returns its exit code and raises nothing."""
    arguments = list(arguments)
    session = Session()
    # Before or after the command: people add it to a line that has just failed.
    if "--debug" in arguments[: [*arguments, "--"].index("--")]:
        arguments.remove("--debug")
        session.debug = True
    render.prepare_streams()
    try:
        with signals_raise():
            command = command_line()
            result = command.main(
                args=arguments, prog_name="pagedmlx", standalone_mode=False, obj=session
            )
            return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Terminated:
        return EXIT_TERMINATED
    except (BrokenPipeError, SystemExit):
        # Typer turns a broken pipe into SystemExit; the reader has gone, so nobody is told.
        render.discard_stdout()
        return 1
    except Exception as error:
        if session.debug:
            render.notice(traceback.format_exc())
        return _report(error)


def _report(error: Exception) -> int:
    match error:
        case InvalidRequestError():
            render.error(str(error), error.hint)
            return 2
        case PagedMLXError():
            render.error(str(error), error.hint)
        case TyperException():
            return _report_usage(error)
        case ImportError() if (error.name or "").startswith("mlx") or "libmlx" in str(error):
            render.error(
                f"MLX can't be loaded: {error}",
                "on Linux install a backend with it: pip install 'pagedmlx[cpu]'",
            )
        case OSError():
            where = f": {error.filename}" if error.filename else ""
            render.error(f"{error.strerror or error}{where}")
        case _:
            render.error(
                f"unexpected {type(error).__name__}: {error}",
                "this is a fault of pagedmlx; please report it with what --debug shows",
            )
    return 1


def _report_usage(error: TyperException) -> int:
    message = error.format_message()
    ctx, param = getattr(error, "ctx", None), getattr(error, "param", None)
    if isinstance(error, typer.BadParameter) and ctx is not None and param is not None:
        name = origin(param.name, ctx)
        # A switch takes a value from the environment only, and typer's message leaves it out.
        given = os.environ.get(name or "", "") if getattr(param, "is_flag", False) else ""
        reason = f"{given!r} is not true or false" if given else error.message
        message = f"{name}: {reason}" if name else message
    where = ctx.command_path if ctx is not None else "pagedmlx"
    render.error(message, f"{where} --help")
    return 2


def main() -> None:
    """The ``pagedmlx`` command."""
    code = run(sys.argv[1:])
    if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        # The engine's thread may be deep in MLX, which aborts when the interpreter goes away.
        render.flush()
        os._exit(code)
    sys.exit(code)
