"""Writes the README's tables of flags from what ``pagedmlx --help`` knows.

python scripts/flag_table.py            # rewrites the tables
python scripts/flag_table.py --check    # changes nothing; fails when they are out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"
START, END = "<!-- flags, by scripts/flag_table.py -->", "<!-- end of flags -->"


def tables() -> str:
    """A table for ``generate``, one each for ``serve`` and ``chat``, and one for the rest."""
    from pagedmlx.cli.app import command_line

    commands = {k: v for k, v in command_line().commands.items() if not v.hidden}
    rows = {name: [*_flags(commands.pop(name))] for name in ("generate", "serve", "chat")}
    lines = ["| flag of `generate` | what it does | default |", "|---|---|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows["generate"]]
    lines += ["", "`serve` has its flags of the engine too, from `--revision` on, and these:", ""]
    lines += ["| flag of `serve` | what it does | default |", "|---|---|---|"]
    own = [cells for cells in rows["serve"] if cells not in rows["generate"]]
    lines += [f"| {' | '.join(cells)} |" for cells in own]
    lines += ["", "`chat` has those of `generate` from `--revision` on, and these:", ""]
    lines += ["| flag of `chat` | what it does | default |", "|---|---|---|"]
    own = [cells for cells in rows["chat"] if cells not in rows["generate"]]
    lines += [f"| {' | '.join(cells)} |" for cells in own]
    lines += ["", "Those of `bench` that run a model have the engine's flags too.", ""]
    lines += ["| command | what it does | flags |", "|---|---|---|"]
    for name, command in _flat(commands):
        own = [cells for cells in _flags(command) if cells not in rows["generate"]]
        flags = "; ".join(f"{flag}: {text}" for flag, text, _ in own) or "none"
        usage = " ".join([name, *_arguments(command)])
        lines.append(f"| `{usage}` | {command.help.splitlines()[0]} | {flags} |")
    return "\n".join(lines)


def _flat(commands: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Commands, and those of groups by both their names."""
    for name, command in commands.items():
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {each}", inner[each]) for each in inner)


def _arguments(command: Any) -> list[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    return [each.name.upper() for each in arguments]


def _flags(command: Any) -> Iterator[tuple[str, str, str]]:
    for option in command.params:
        if option.param_type_name != "option":
            continue
        value = f" {option.metavar or 'TEXT'}" if not option.is_flag else ""
        names = ", ".join(f"`{name}{value}`" for name in reversed(option.opts))
        if option.secondary_opts:
            names += f", `{option.secondary_opts[0]}`"
        yield names, option.help.replace("|", "\\|"), _default(option)


def _default(option: Any) -> str:
    if option.is_flag:
        return "on" if option.default else "off"
    shown = option.default not in (None, [], ())
    return (
        f"{option.default:g}"
        if isinstance(option.default, float)
        else (str(option.default) if shown else "")
    )


def with_tables(readme: str) -> str:
    """The text of the README with the tables as they should be."""
    before, _, rest = readme.partition(START)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{README.name} lacks the lines {START} and {END}")
    return f"{before}{START}\n\n{tables()}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    now = README.read_text(encoding="utf-8")
    wanted = with_tables(now)
    if now == wanted:
        print(f"{README.name}: the tables of flags are up to date", file=sys.stderr)
    elif options.check:
        raise SystemExit(f"{README.name}: the tables of flags are out of date; run this script")
    else:
        README.write_text(wanted, encoding="utf-8")
        print(f"{README.name}: tables of flags written", file=sys.stderr)


if __name__ == "__main__":
    main()
