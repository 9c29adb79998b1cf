"""What a command was asked for; opens its model and puts a prompt into the form that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedmlx.cli import render
from pagedmlx.cli.prompts import Prompt
from pagedmlx.cli.results import check_writable
from pagedmlx.config import EngineConfig
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import InvalidRequestError

if TYPE_CHECKING:
    from pagedmlx.llm import LLM


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one prompt and a file of prompts have in common.

    Attributes:
        config: The engine's settings, the model's name among them.
        params: Sampling settings.
        system: System message for prompts without one of their own.
        raw: Complete the bare prompt, without the chat template.
        as_json: Write JSON to stdout.
        stats_json: Write the summary to this file; ``-`` is stdout.
        quiet: No notices on stderr.
    """

    config: EngineConfig
    params: SamplingParams
    system: str | None = None
    raw: bool = False
    as_json: bool = False
    stats_json: str | None = None
    quiet: bool = False


@contextmanager
def open_llm(wishes: Wishes) -> Iterator[LLM]:
    """Find, load and at the end close a model; the stages show on stderr.

    Raises:
        PagedMLXError: It can't be found or loaded, or the summary couldn't be written later.
    """
    config, quiet = wishes.config, wishes.quiet
    if wishes.stats_json is not None and wishes.stats_json != "-":
        check_writable(Path(wishes.stats_json))
    from pagedmlx import hub

    # Before MLX is imported, so that a wrong name is told at once.
    with render.download(shown=not quiet) as show:
        hub.resolve(config.model, config.revision, config.offline, show)
    from pagedmlx.llm import LLM

    with render.meter(shown=not quiet) as meter:
        meter.stage("starting")
        llm = LLM(config=config, on_progress=meter.stage)
    with llm:
        if not quiet:
            for note in llm.load_notes:
                render.notice(note)
        yield llm


def build_prompt(prompt: Prompt, *, has_template: bool, raw: bool) -> tuple[str, Any]:
    """The field of a Job that the prompt goes into, and its value.

    Returns:
        ``messages`` for the chat template, ``prompt`` for a bare completion, or
        ``prompt_token_ids``, which are taken as they are.

    Raises:
        InvalidRequestError: It needs a chat template, and there is none or ``raw`` is set.
    """
    if prompt.prompt_token_ids is not None:
        return "prompt_token_ids", prompt.prompt_token_ids
    if has_template and not raw:
        if prompt.messages is not None:
            return "messages", prompt.messages
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        return "messages", [*system, {"role": "user", "content": prompt.prompt}]
    needs = "messages" if prompt.messages is not None else "system" if prompt.system else None
    if needs:
        reason = "--raw turns it off" if raw else "this model has none"
        raise InvalidRequestError(needs, f"needs a chat template, and {reason}")
    return "prompt", prompt.prompt
