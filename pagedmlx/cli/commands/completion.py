"""``pagedmlx completion``: a script that lets a shell complete commands and flags.

The script holds all that it needs, so completing is instant; it starts no Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from pagedmlx.cli import render

_Flags = Mapping[str, tuple[tuple[str, ...], str, bool]]
"""A flag's name, to all its spellings, its help, and whether a value follows."""


class Shell(StrEnum):
    """Shells that a script can be written for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    ctx: typer.Context, shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish.")]
) -> None:
    """Write a script that completes commands and flags in a shell.

    bash and zsh, in ~/.bashrc or ~/.zshrc: source <(pagedmlx completion bash), or zsh. fish, in
    config.fish: pagedmlx completion fish | source.
    """
    command: Any = ctx.find_root().command
    write: Callable[[Mapping[str, str], Mapping[str, _Flags]], str] = {
        Shell.BASH: _bash,
        Shell.ZSH: _zsh,
        Shell.FISH: _fish,
    }[shell]
    commands = {name: each.get_short_help_str(80) for name, each in command.commands.items()}
    # A group's commands are completed alike: they have most flags in common.
    flags = {
        name: {key: flag for one in (each, *_within(each)) for key, flag in _flags(one).items()}
        for name, each in command.commands.items()
    }
    render.text(write(commands, flags), end="")


def _within(command: Any) -> list[Any]:
    return list(getattr(command, "commands", {}).values())


def _flags(command: Any) -> _Flags:
    flags = {
        option.name: (
            (*option.opts, *option.secondary_opts),
            option.help or "",
            not (option.is_flag or option.count),
        )
        for option in command.params
        if option.param_type_name == "option"
    }
    return {**flags, "help": (("--help", "-h"), "Show this message and exit.", False)}


def _bash(commands: Mapping[str, str], flags: Mapping[str, _Flags]) -> str:
    cases = "".join(
        f'        {name}) flags="{" ".join(s for f in each.values() for s in f[0])}" ;;\n'
        for name, each in flags.items()
    )
    return f"""_pagedmlx() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" flags="--help --version --debug"
    case "${{COMP_WORDS[1]}}" in
{cases}    esac
    COMPREPLY=()
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
    elif [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "{" ".join(commands)}" -- "$word"))
    fi
}}
complete -o default -F _pagedmlx pagedmlx
"""


def _zsh(commands: Mapping[str, str], flags: Mapping[str, _Flags]) -> str:
    listed = "".join(f"        {_quoted(f'{name}:{text}')}\n" for name, text in commands.items())
    cases = "".join(
        f"        {name}) flags=(\n{''.join(map(_zsh_flag, each.values()))}        ) ;;\n"
        for name, each in flags.items()
    )
    return f"""#compdef pagedmlx
_pagedmlx() {{
    local -a commands flags
    commands=(
{listed}    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    case $words[2] in
{cases}    esac
    shift words
    (( CURRENT-- ))
    _arguments -S $flags '*:file:_files'
}}
compdef _pagedmlx pagedmlx
"""


def _zsh_flag(flag: tuple[tuple[str, ...], str, bool]) -> str:
    spellings, text, takes_value = flag
    text = text.replace("[", "(").replace("]", ")")
    tail = ":value:_files" if takes_value else ""
    return "".join(f"            {_quoted(f'{s}[{text}]{tail}')}\n" for s in spellings)


def _fish(commands: Mapping[str, str], flags: Mapping[str, _Flags]) -> str:
    lines = [
        f"complete -c pagedmlx -n __fish_use_subcommand -f -a {name} -d {_fish_quoted(text)}"
        for name, text in commands.items()
    ]
    for name, each in flags.items():
        for spellings, text, takes_value in each.values():
            names = " ".join(
                f"-l {s[2:]}" if s.startswith("--") else f"-s {s[1:]}" for s in spellings
            )
            lines.append(
                f"complete -c pagedmlx -n '__fish_seen_subcommand_from {name}' {names}"
                f"{' -r' if takes_value else ''} -d {_fish_quoted(text)}"
            )
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
