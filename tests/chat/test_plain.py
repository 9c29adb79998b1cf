"""The chat line by line."""

from __future__ import annotations

import re

import pytest

from pagedmlx.chat.plain import PlainOutput, run_plain
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import PagedMLXError
from tests.support.chat import FakeClient, engine_client, failed


def talk(
    client: FakeClient, *lines: str, is_patient: bool = True, system: str = ""
) -> tuple[str, list[str]]:
    """What stands on standard output, and the notices."""
    answers: list[str] = []
    notices: list[str] = []
    output = PlainOutput(
        answers.append, notices.append, lambda _what, _share: None, is_patient=is_patient
    )
    ended = run_plain(client, lines, output, params=SamplingParams(), system=system)
    assert ended
    assert client.num_closes == 1
    return "".join(answers), notices


def contents(client: FakeClient) -> list[list[str]]:
    return [[each["content"] for each in request.messages] for request in client.requests]


def test_each_line_is_a_message_and_the_conversation_goes_on() -> None:
    client = FakeClient()
    answers, notices = talk(client, "one", "", "two")
    assert answers == "Hello there.\nHello there.\n"
    assert notices == ["a note"]
    assert contents(client) == [["one"], ["one", "Hello there.", "two"]]


def test_a_backslash_goes_on_in_the_next_line() -> None:
    client = FakeClient()
    talk(client, "one\\", "two", "three\\")
    assert contents(client)[0] == ["one\ntwo"]
    assert contents(client)[1][-1] == "three"


def test_commands_of_a_line_work_and_others_say_why_not() -> None:
    client = FakeClient()
    _, notices = talk(
        client, "/system Be brief.", "/set temp 0.1", "one", "/retry", "/clear", "/branch", "two",
        "/quit", "three",
    )  # fmt: skip
    assert contents(client) == [["Be brief.", "one"], ["Be brief.", "one"], ["Be brief.", "two"]]
    assert client.requests[0].params.temperature == 0.1
    assert any("/branch needs the full screen" in text for text in notices)


def test_settings_are_shown_told_and_changed() -> None:
    client = FakeClient()
    _, notices = talk(client, "/set", "/set temp", "/set top_k=5", "/help", "one")
    assert any(re.match(r"max_tokens +256 +longest answer", text) for text in notices)
    assert any(text.startswith("temperature is 1: 0 always takes") for text in notices)
    assert "top_k is 5 from now on" in notices
    assert client.requests[0].params.top_k == 5
    assert any(re.match(r"/set \[NAME \[VALUE\]\] +change", text) for text in notices)
    assert not any("kept" in text or "saved" in text for text in notices)


def test_a_failure_is_told_to_who_can_ask_again_and_ends_a_pipe() -> None:
    client = FakeClient()
    client.error = failed("no memory")
    answers, notices = talk(client, "one", "/nonsense")
    assert answers == "Hello there.\n"
    assert notices[1] == "error: no memory"
    assert notices[2].startswith("error: /nonsense")
    client = FakeClient()
    client.error = failed("no memory")
    with pytest.raises(PagedMLXError, match="no memory"):
        talk(client, "one", is_patient=False)
    assert client.num_closes == 1


def test_a_model_that_cannot_be_loaded_is_an_error() -> None:
    client = FakeClient()
    client.start_error = failed("no such model")
    with pytest.raises(PagedMLXError, match="no such model"):
        talk(client, "one")
    assert client.num_closes == 1


def test_a_real_engine_streams_to_the_end() -> None:
    answers: list[str] = []
    output = PlainOutput(answers.append, lambda _text: None, lambda _what, _share: None)
    params = SamplingParams(temperature=0.0, max_tokens=None)
    assert run_plain(engine_client("Yes."), ["one", "two"], output, params=params)
    assert "".join(answers) == "Yes.\nYes.\n"
