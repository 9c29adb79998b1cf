"""One prompt: streamed to stdout as it is generated, or written as one JSON object."""

from __future__ import annotations

import sys

import typer

from pagedmlx.cli import render
from pagedmlx.cli.model import Wishes, build_prompt, open_llm
from pagedmlx.cli.prompts import Prompt, check_prompt
from pagedmlx.cli.results import output_row
from pagedmlx.cli.summary import is_broken, summarize, summary_line, write_summary
from pagedmlx.errors import InvalidRequestError


def run_single(wishes: Wishes, words: str | None) -> None:
    """Answer one prompt; ``words`` None or ``-`` reads it from stdin.

    Raises:
        InvalidRequestError: There is no prompt, or it can't be served.
        typer.Exit: An invariant was broken; the exit code is 1.
    """
    quiet = wishes.quiet
    request = Prompt(0, "0", wishes.params, prompt=_read_prompt(words))
    with open_llm(wishes) as llm:
        params, has_template = wishes.params_for(llm), llm.has_chat_template
        fields = build_prompt(request, wishes, has_template=has_template)
        variables = fields.pop("chat_template_kwargs", None)
        (prompt,) = fields.values()
        if not (wishes.raw or quiet or has_template):
            render.notice("this model has no chat template: the bare prompt is completed")
        streams = not wishes.as_json and params.n == 1
        last = None
        for last in llm.stream(prompt, params, chat_template_kwargs=variables):
            if streams:
                render.text(last.outputs[0].delta, end="")
        if last is None:
            raise RuntimeError("the stream ended before it began")
        summary = summarize(llm, params, num_prompts=1, wall_s=last.metrics.total_s)
        if wishes.as_json:
            row = output_row(last)
            del row["id"]
            render.json_document(row if wishes.stats_json else {**row, "summary": summary})
        elif streams:
            render.text("")
        else:
            for choice in last.outputs:
                render.text(f"--- {choice.index + 1} of {len(last.outputs)} ---\n{choice.text}")
        if wishes.stats_json:
            write_summary(summary, wishes.stats_json)
        if not quiet:
            render.notice(summary_line(summary, first_token_s=last.metrics.ttft_s or 0.0))
    if is_broken(summary):
        raise typer.Exit(1)


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
