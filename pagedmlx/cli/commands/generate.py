"""``pagedmlx generate``: one prompt streamed to stdout, or a file of prompts in one batch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pagedmlx.cli import render
from pagedmlx.cli.batch import run_batch
from pagedmlx.cli.model import build_prompt, has_chat_template, open_llm
from pagedmlx.cli.prompts import Prompt, check_prompt
from pagedmlx.cli.results import output_row
from pagedmlx.cli.summary import summarize, summary_line, write_summary
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
    if prompts_file is not None:
        if words is not None:
            raise InvalidRequestError("PROMPT", "there is --prompts-file too", hint="drop one")
        run_batch(
            config,
            params,
            prompts_file,
            system=system,
            raw=raw,
            as_json=as_json,
            output=output,
            resume=resume,
            stats_json=stats_json,
            quiet=quiet,
        )
        return
    for flag, given in (("--output", output is not None), ("--resume", resume)):
        if given:
            raise InvalidRequestError(flag, "goes with --prompts-file", hint="or use > FILE")
    request = Prompt(0, "0", params, prompt=_read_prompt(words), system=system)
    _run_one(config, request, raw=raw, as_json=as_json, stats_json=stats_json, quiet=quiet)


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


def _read_prompt(words: str | None) -> str:
    if words is not None and words != "-":
        text = words
    elif words is None and sys.stdin.isatty():
        raise InvalidRequestError(
            "PROMPT", "is missing", hint='pagedmlx generate smollm2 "your prompt", or pipe it in'
        )
    else:
        try:
            text = sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                "prompt", f"stdin is not UTF-8 at byte {error.start + 1}"
            ) from error
    check_prompt(text)
    return text


def _run_one(
    config: EngineConfig,
    request: Prompt,
    *,
    raw: bool,
    as_json: bool,
    stats_json: str | None,
    quiet: bool,
) -> None:
    with open_llm(config, quiet=quiet) as llm:
        has_template = has_chat_template(llm)
        _, prompt = build_prompt(request, has_template=has_template, raw=raw)
        if not (raw or quiet or has_template):
            render.notice("this model has no chat template: the bare prompt is completed")
        streams = not as_json and request.params.n == 1
        last = None
        for last in llm.stream(prompt, request.params):
            if streams:
                render.text(last.outputs[0].delta, end="")
        if last is None:
            raise RuntimeError("the stream ended before it began")
        summary = summarize(llm, num_prompts=1, wall_s=last.metrics.total_s)
        if as_json:
            row = output_row(last)
            del row["id"]
            render.json_document(row if stats_json else {**row, "summary": summary})
        elif streams:
            render.text("")
        else:
            for choice in last.outputs:
                render.text(f"--- {choice.index + 1} of {len(last.outputs)} ---\n{choice.text}")
        if stats_json:
            write_summary(summary, stats_json)
        if not quiet:
            render.notice(summary_line(summary, first_token_s=last.metrics.ttft_s or 0.0))
