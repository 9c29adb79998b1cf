from __future__ import annotations

import io
import sys

import pytest

from pagedmlx.cli import render


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    # Not a fixture: pytest puts its own streams back between setting up and running a test.
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    return out


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    render.text("a\x1b[2Jb\x9b31m\tc\x07é漢🙂")
    render.notice("x\x1b]0;title\x07")
    assert terminal.getvalue() == "a�[2Jb�31m\tc�é漢🙂\nx�]0;title�\n"


def test_control_characters_reach_a_pipe_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    render.text("a\x1b[2J")
    assert capsys.readouterr().out == "a\x1b[2J\n"


def test_an_error_is_one_line_whatever_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    render.error("first\nsecond", "do\nthis")
    assert capsys.readouterr().err == "error: first second\nhint: do this\n"


def test_the_meter_shows_names_with_brackets_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with render.meter() as meter:
        meter.stage("loading [red]x[/]", 0.5)
        meter.stage("[/]")
        meter.count("prompts", 3, None)
        meter.stop()
    assert terminal.getvalue()


def test_the_meter_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with render.meter() as meter:
        meter.stage("loading", 0.5)
        meter.stop()
    assert capsys.readouterr() == ("", "")


def test_a_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    render.table([("NAME", "SIZE"), ("a", "1")])
    assert capsys.readouterr().out == "NAME  SIZE\na     1\n"
