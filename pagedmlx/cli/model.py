"""What a command was asked for; opens its model and puts a prompt into the form that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
        params: Sampling settings; ``params_for`` gives those that are in force.
        given: Sampling settings that the user gave a value for.
        system: System message for prompts without one of their own.
        template_variables: Further variables for the chat template.
        raw: Complete the bare prompt, without the chat template.
        as_json: Write JSON to stdout.
        stats_json: Write the summary to this file; ``-`` is stdout.
        quiet: No notices on stderr.
    """

    config: EngineConfig
    params: SamplingParams
    given: frozenset[str] = frozenset()
    system: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    raw: bool = False
    as_json: bool = False
    stats_json: str | None = None
    quiet: bool = False

    def params_for(self, llm: LLM) -> SamplingParams:
        """The user's sampling settings over the model's own over the defaults of the flags."""
        own = llm.sampling_defaults.items()
        return replace(self.params, **{key: value for key, value in own if key not in self.given})


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


def build_prompt(prompt: Prompt, wishes: Wishes, *, has_template: bool) -> dict[str, Any]:
    """The fields of a Job that say what the prompt is.

    Returns:
        ``messages`` and ``chat_template_kwargs``, or ``prompt`` for a bare completion, or
        ``prompt_token_ids``, which are taken as they are.

    Raises:
        InvalidRequestError: It needs a chat template, and there is none or ``raw`` is set.
    """
    if prompt.prompt_token_ids is not None:
        return {"prompt_token_ids": prompt.prompt_token_ids}
    system = prompt.system if prompt.system is not None else wishes.system
    variables = {**wishes.template_variables, **prompt.chat_template_kwargs}
    if has_template and not wishes.raw:
        messages = prompt.messages
        if messages is None:
            first = [{"role": "system", "content": system}] if system else []
            messages = [*first, {"role": "user", "content": prompt.prompt}]
        return {"messages": messages, "chat_template_kwargs": variables}
    needs = {"messages": prompt.messages, "system": system, "chat_template_kwargs": variables}
    for field_name, value in needs.items():
        if value:
            reason = "--raw turns it off" if wishes.raw else "this model has none"
            raise InvalidRequestError(field_name, f"needs a chat template, and {reason}")
    return {"prompt": prompt.prompt}
