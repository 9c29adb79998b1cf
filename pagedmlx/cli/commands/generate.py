"""``pagedmlx generate``: one prompt streamed to stdout, or a file of prompts in one batch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedmlx.cli.options import given_fields
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
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(help="Variables for the chat template, as a JSON object.", metavar="JSON"),
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

    With --model the first argument is the prompt. Every flag can be set in the environment as
    PAGEDMLX_<FLAG>, and in the config file by its name. How to sample is the model's own wish
    (generation_config.json) where no flag says it, else greedy.
    """
    name, words = _model_and_prompt(
        ctx, model_flag, model, prompt, has_file=prompts_file is not None
    )
    config = replace(config, model=name)
    variables = _template_variables(chat_template_kwargs)
    for field, is_given in (("system", system is not None), ("chat_template_kwargs", variables)):
        if raw and is_given:
            raise InvalidRequestError(field, "needs the chat template, and --raw turns it off")
    from pagedmlx.cli.model import Wishes

    wishes = Wishes(
        config=config,
        params=params,
        given=given_fields(ctx),
        system=system,
        template_variables=variables,
        raw=raw,
        as_json=as_json,
        stats_json=stats_json,
        quiet=quiet,
    )
    if prompts_file is not None:
        if words is not None:
            raise InvalidRequestError("PROMPT", "there is --prompts-file too", hint="drop one")
        from pagedmlx.cli.batch import run_batch

        run_batch(wishes, prompts_file, output=output, resume=resume)
        return
    for field, is_given in (("output", output is not None), ("resume", resume)):
        if is_given:
            raise InvalidRequestError(field, "goes with --prompts-file", hint="or use > FILE")
    from pagedmlx.cli.single import run_single

    run_single(wishes, words)


def _template_variables(text: str | None) -> dict[str, Any]:
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            "chat_template_kwargs",
            f"{text!r} is not a JSON object",
            hint="such as '{\"enable_thinking\": false}', in single quotes",
        )
    return value


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
