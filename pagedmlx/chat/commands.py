"""The slash commands: what there is, and which one a line means. Pure; app.py carries them out."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import InvalidRequestError, PagedMLXError


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        name: Without its slash.
        usage: Its arguments, for people.
        help: One line.
    """

    name: str
    usage: str
    help: str


COMMANDS = (
    Command("help", "", "Keys and commands."),
    Command("new", "", "Another conversation beside this one."),
    Command("close", "", "Close this tab; the conversation stays saved."),
    Command("model", "[NAME]", "Take another model; without a name choose one."),
    Command("system", "[TEXT]", "Set the system message; - takes it away."),
    Command("set", "[NAME VALUE]", "Change how answers are sampled; alone shows all settings."),
    Command("n", "COUNT [QUESTION]", "Ask for several candidate answers side by side."),
    Command("retry", "", "Answer the last question once more; both answers are kept."),
    Command("edit", "", "Change your last message and send it again."),
    Command("branch", "", "Go on in a new tab from here, sharing the blocks up to here."),
    Command("save", "[FILE]", "Save now; with FILE export as Markdown, or as .json."),
    Command("load", "[WORDS]", "Open a saved conversation; WORDS search in all of them."),
    Command("rename", "TITLE", "Call this conversation something else."),
    Command("delete", "yes", "Delete this conversation for good; without yes, ask first."),
    Command("clear", "", "Begin this conversation anew; what was said stays saved."),
    Command("copy", "[code [N]]", "Copy the last answer, or its last code block, or its Nth."),
    Command("stats", "", "What the engine has counted."),
    Command("quit", "", "Leave."),
)

_ALIASES = {"?": "help", "exit": "quit", "bye": "quit", "q": "quit", "open": "load"}

SETTINGS = {
    "temperature": "0 always takes the likeliest token; 1 follows the model's odds; more is wilder",
    "top_p": "choose among the likeliest tokens that together have this probability; 1 is all",
    "top_k": "choose among so many of the likeliest tokens; 0 is all",
    "min_p": "leave out tokens less likely than this times the likeliest; 0 is none",
    "repetition_penalty": "above 1, tokens that came before are less likely; 1 is off",
    "presence_penalty": "above 0, tokens that the answer has are less likely; -2 to 2",
    "frequency_penalty": "the same for each time that they came; -2 to 2",
    "max_tokens": "longest answer in tokens; none or 0 is as long as the context allows",
    "seed": "the same number gives the same answer; none is another one each time",
    "n": "candidate answers side by side, of which you pick one",
    "stop": "the answer ends before this text; none takes it away",
}
"""What can be set for a conversation, and what it means."""

_SHORT = {"temp": "temperature"}


def parse(text: str) -> tuple[Command, str] | None:
    """The command that a text is, and its arguments; None for a message to the model.

    ``//`` at the beginning is a message that begins with a slash.

    Raises:
        PagedMLXError: It looks like a command and is none.
    """
    line = text.strip()
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, rest = line[1:].partition(" ")
    if "\n" in name:
        name, _, more = name.partition("\n")
        rest = f"{more} {rest}"
    name = _ALIASES.get(name.lower(), name.lower())
    known = {command.name: command for command in COMMANDS}
    if name in known:
        return known[name], rest.strip()
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean /{close[0]}? " if close else ""
    raise PagedMLXError(
        f"/{name} is not a command", hint=f"{hint}/help lists them; // sends a slash"
    )


def message_text(text: str) -> str:
    """What is sent of a text that is no command; half characters can't be."""
    line = text.strip()
    line = line[1:] if line.startswith("//") else line
    return line.encode("utf-8", "replace").decode("utf-8")


def obey_set(params: SamplingParams, rest: str) -> tuple[SamplingParams, str]:
    """What ``/set NAME VALUE`` makes of settings, and what to say; without VALUE it only says.

    Raises:
        PagedMLXError: No such setting, or a value that it can't have.
    """
    name, _, value = rest.replace("=", " ", 1).partition(" ")
    if value.strip():
        params = with_setting(params, name, value)
    name = _setting_name(name)
    meaning = " from now on" if value.strip() else f": {SETTINGS[name]}"
    return params, f"{name} is {setting_text(params, name)}{meaning}"


def with_setting(params: SamplingParams, name: str, value: str) -> SamplingParams:
    """Settings with one of them changed.

    Raises:
        PagedMLXError: No such setting, or a value that it can't have.
    """
    field_name = _setting_name(name)
    return replace(params, **{field_name: _value(field_name, value.strip())})


def _setting_name(name: str) -> str:
    field_name = name.strip().replace("-", "_")
    field_name = _SHORT.get(field_name, field_name)
    if field_name not in SETTINGS:
        close = difflib.get_close_matches(field_name, SETTINGS, n=1)
        raise PagedMLXError(
            f"{name} is not a setting",
            hint=f"did you mean {close[0]}?" if close else "/set shows all",
        )
    return field_name


def setting_text(params: SamplingParams, name: str) -> str:
    """A setting's value as ``with_setting`` reads it."""
    value = getattr(params, name)
    if name == "stop":
        return value[0] if value else "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _value(name: str, text: str) -> object:
    if name == "stop":
        return () if text in ("", "none") else (text.replace("\\n", "\n"),)
    if text == "none" and name in ("max_tokens", "seed"):
        return None
    if text == "0" and name == "max_tokens":
        return None  # as with --max-tokens
    kind = next(each.type for each in fields(SamplingParams) if each.name == name)
    try:
        return float(text) if kind == "float" else int(text)
    except ValueError:
        wanted = "a number" if kind == "float" else "a whole number"
        raise InvalidRequestError(name, f"{text!r} is not {wanted}") from None
