"""The README says what the command line is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagedmlx.cli.app import command_line
from tests.test_project import REPOSITORY, run_python

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
SCRIPT = REPOSITORY / "scripts" / "flag_table.py"


def test_the_tables_of_flags_are_those_of_the_command_line() -> None:
    run_python(str(SCRIPT), "--check")


def test_a_table_that_is_out_of_date_is_told_and_can_be_written_anew(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / SCRIPT.name
    script.parent.mkdir()
    script.write_text(SCRIPT.read_text())
    changed = README.replace("Token budget of one step.", "Something else.")
    (tmp_path / "README.md").write_text(changed)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1
    assert "out of date" in done.stderr
    assert (tmp_path / "README.md").read_text() == changed
    subprocess.run([sys.executable, script], check=True, capture_output=True, env=environment)
    assert (tmp_path / "README.md").read_text() == README


def test_the_table_of_generate_has_the_flags_of_its_help() -> None:
    help_text = run_python("-m", "pagedmlx", "generate", "--help")
    table, _, _ = README.partition("`serve` has its flags of the engine too")
    in_table = set(re.findall(r"`(--[\w-]+)[ `]", table.partition("| flag of `generate`")[2]))
    in_help = set(re.findall(r"^ +(?:-\w, )?(--[\w-]+)", help_text, re.MULTILINE))
    assert {flag for flag in in_table if not flag.startswith("--no-")} == in_help - {"--help"}


@pytest.mark.parametrize("line", re.findall(r"^(?:\.venv/bin/)?pagedmlx (.+)$", README, re.M))
def test_the_commands_of_the_readme_are_commands_with_flags_that_exist(line: str) -> None:
    name, *rest = line.split()
    command = command_line().commands[name]
    if hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    known = {spelling for each in command.params for spelling in each.opts}
    assert {word for word in rest if word.startswith("--")} <= known
