"""``pagedmlx generate``: one prompt streamed to stdout, or a file of prompts in one batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pagedmlx.config import EngineConfig
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import InvalidRequestError


def generate(
    ctx: typer.Context,
    config: EngineConfig,
    params: SamplingParams,
    model_flag: str | None,
    model: Annotated[str | None, typer.Argument(help="Model; smollm2 unless given.")] = None,
    prompt: Annotated[str | None, typer.Argument(help="Prompt; - reads stdin.")] = None,
    system: Annotated[
        str | None, typer.Option(help="System message before the prompt.", metavar="TEXT")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the bare prompt, without a chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write JSON: one object, or one a line with a file.")
    ] = False,
    prompts_file: Annotated[
        str | None,
        typer.Option(help="Prompts, one a line, as text or JSON objects.", metavar="FILE"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Append JSON rows to this file.", metavar="FILE")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out the ids that --output has already.")
    ] = False,
    stats_json: Annotated[
        str | None,
        typer.Option(help="Write the summary there as JSON; - is stdout.", metavar="FILE"),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No notices and no statistics.")
    ] = False,
) -> None:
    """Answer a prompt, or a file of prompts, with a model.

    With --model the first argument is the prompt. Every engine and sampling flag can be set in
    the environment as PAGEDMLX_<FLAG>, and in the config file by its name.
    """
    name, words = _model_and_prompt(
        ctx, model_flag, model, prompt, has_file=prompts_file is not None
    )
    config = replace(config, model=name)
    if raw and system is not None:
        raise InvalidRequestError("--system", "needs the chat template, and --raw turns it off")
    from pagedmlx.cli.model import Wishes

    wishes = Wishes(config, params, system, raw, as_json, stats_json, quiet)
    if prompts_file is not None:
        if words is not None:
            raise InvalidRequestError("PROMPT", "there is --prompts-file too", hint="drop one")
        from pagedmlx.cli.batch import run_batch

        run_batch(wishes, prompts_file, output=output, resume=resume)
        return
    for flag, given in (("--output", output is not None), ("--resume", resume)):
        if given:
            raise InvalidRequestError(flag, "goes with --prompts-file", hint="or use > FILE")
    from pagedmlx.cli.single import run_single

    run_single(wishes, words)


def _model_and_prompt(
    ctx: typer.Context, flag: str | None, first: str | None, second: str | None, *, has_file: bool
) -> tuple[str, str | None]:
    # By its name, since typer keeps the enumeration private.
    typed = getattr(ctx.get_parameter_source("model_flag"), "name", "") == "COMMANDLINE"
    if flag is None or (first is not None and not typed and (second is not None or has_file)):
        return EngineConfig().model if first is None else first, second
    if second is not None:
        raise InvalidRequestError(
            "PROMPT", f"{second!r} is one too many: --model is given", hint="quote the prompt"
        )
    return flag, first
