"""Slash commands: what a line means, and settings that can't be."""

from __future__ import annotations

import pytest

from pagedmlx.chat.commands import (
    SETTINGS,
    message_text,
    obey_set,
    parse,
    setting_text,
    with_setting,
)
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import PagedMLXError


@pytest.mark.parametrize(
    ("text", "name", "rest"),
    [
        ("/help", "help", ""),
        ("/?", "help", ""),
        (" /SYSTEM  Be brief. ", "system", "Be brief."),
        ("/system first\nsecond", "system", "first\nsecond"),
        ("/exit", "quit", ""),
        ("/n 3 why?", "n", "3 why?"),
    ],
)
def test_a_command_and_its_arguments(text: str, name: str, rest: str) -> None:
    found = parse(text)
    assert found is not None
    assert (found[0].name, found[1]) == (name, rest)


@pytest.mark.parametrize("text", ["hello", "", "//etc/hosts has what?", "what is /help?", "1/2"])
def test_other_texts_are_messages(text: str) -> None:
    assert parse(text) is None


def test_a_misspelt_command_is_not_sent_to_the_model() -> None:
    with pytest.raises(PagedMLXError, match="/hepl is not a command") as caught:
        parse("/hepl me")
    assert "did you mean /help?" in caught.value.hint


def test_what_is_sent_has_no_half_characters_and_one_of_two_slashes() -> None:
    assert message_text("//etc ") == "/etc"
    assert message_text("a\ud83d b") == "a? b"
    assert message_text("  two\n lines \n") == "two\n lines"


def test_every_setting_can_be_read_and_written_back() -> None:
    params = SamplingParams(temperature=0.5, stop=("END",), seed=3, max_tokens=None)
    for name in SETTINGS:
        assert with_setting(params, name, setting_text(params, name)) == params


@pytest.mark.parametrize(
    ("name", "value", "field", "result"),
    [
        ("temp", "0", "temperature", 0.0),
        ("top-p", "0.5", "top_p", 0.5),
        ("max_tokens", "none", "max_tokens", None),
        ("max_tokens", "0", "max_tokens", None),
        ("seed", "7", "seed", 7),
        ("n", "3", "n", 3),
        ("stop", "a\\nb", "stop", ("a\nb",)),
        ("stop", "none", "stop", ()),
    ],
)
def test_a_setting_is_changed(name: str, value: str, field: str, result: object) -> None:
    assert getattr(with_setting(SamplingParams(), name, value), field) == result


def test_a_setting_without_a_value_is_told_and_stays() -> None:
    params = SamplingParams(stop=("END",))
    assert obey_set(params, "stop") == (
        params,
        "stop is END: the answer ends before this text; none takes it away",
    )
    assert obey_set(params, "stop none") == (SamplingParams(), "stop is none from now on")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("temperature", "-1", "temperature: -1.0 must be at least 0"),
        ("temperature", "warm", "'warm' is not a number"),
        ("top_k", "1.5", "'1.5' is not a whole number"),
        ("max_tokens", "", "'' is not a whole number"),
        ("n", "0", "n: 0 must be between 1"),
        ("temprature", "1", "is not a setting"),
    ],
)
def test_a_value_that_cannot_be_is_refused(name: str, value: str, problem: str) -> None:
    with pytest.raises(PagedMLXError, match=problem):
        with_setting(SamplingParams(), name, value)
