"""One conversation on the screen: writing, pasting, streaming, stopping, versions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import Collapsible

from pagedmlx.chat.app import ChatApp
from pagedmlx.chat.options import ChatOptions
from pagedmlx.chat.widgets.message import MessageView
from tests.support.chat import (
    FakeClient,
    calm,
    failed,
    running,
    say,
    screen_text,
    settle,
    shows,
    told,
    until,
)

Story = Callable[[ChatApp, Pilot[int]], Awaitable[None]]


def play(client: FakeClient, story: Story, size: tuple[int, int] = (120, 40)) -> None:
    async def run() -> None:
        async with running(client, size=size) as (app, pilot):
            await until(pilot, lambda: app.client is not None or client.start_gate is not None)
            await story(app, pilot)

    asyncio.run(run())


def texts(app: ChatApp) -> list[str]:
    return [message.text for message in app.pane.conversation.path()]


def test_a_question_is_answered_on_the_screen() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await pilot.press(*"why?", "enter")
        await settle(pilot)
        assert texts(app) == ["why?", "Hello **there**."]
        shown = screen_text(app)
        assert "why?" in shown
        assert "Hello there." in shown
        assert "9/100" in shown
        assert app.pane.prompt.text == ""

    play(FakeClient(["Hello ", "**there**."]), story)


TRICKS = "[00] foo, [red]x[/red], [/], [link=a]b, \\[b <b>bold</b> \x1b[31mred\x07\u202e {{x}} $y"


def test_brackets_tags_and_control_characters_are_shown_and_steer_nothing() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, TRICKS)
        await settle(pilot)
        shown = screen_text(app)
        assert shown.count("[00] foo, [red]x[/red], [/], [link=a]b") == 2
        assert shown.count("<b>bold</b>") == 2
        assert "\x1b" not in shown
        assert "\x07" not in shown
        assert "\u202e" not in shown
        await say(pilot, "/rename [red]title[/]")
        await shows(pilot, "[red]title[/]")

    play(FakeClient([TRICKS[:12], TRICKS[12:]]), story)


PASTED = "first line\n\n\tindented\nemoji 🦊 and e\u0301\nlast"


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_paste_of_several_lines_is_one_draft_that_is_sent_once(line_end: str) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        app.post_message(events.Paste(PASTED.replace("\n", line_end)))
        await until(pilot, lambda: app.pane.prompt.text.replace(line_end, "\n") == PASTED)
        assert client.requests == []
        await pilot.press("enter")
        await settle(pilot)
        assert [request.messages[-1]["content"] for request in client.requests] == [PASTED]

    client = FakeClient()
    play(client, story)


def test_a_paste_while_an_answer_streams_stays_a_draft() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        client.gate = asyncio.Semaphore(1)
        await say(pilot, "one")
        await until(pilot, lambda: texts(app)[-1:] == ["Hello "])
        app.post_message(events.Paste("two\nlines"))
        await until(pilot, lambda: app.pane.prompt.text == "two\nlines")
        await pilot.press("enter")
        await told(pilot, "still answering")
        assert app.pane.prompt.text == "two\nlines"
        client.gate.release()
        await settle(pilot)
        client.gate = None
        await pilot.press("enter")
        await settle(pilot)
        assert texts(app)[2] == "two\nlines"

    client = FakeClient()
    play(client, story)


def test_what_is_typed_ahead_belongs_to_the_next_message() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        def type_ahead(*keys: str) -> None:
            # All of it is there before anything of it is done.
            for key in keys:
                character = {"enter": None, "space": " ", "slash": "/"}.get(key, key)
                app.post_message(events.Key(key, character))

        type_ahead("slash", *"set", "space", "n", "space", "2", "enter", *"one", "enter", *"two")
        await settle(pilot)
        await until(pilot, lambda: app.pane.prompt.text == "two")
        assert [request.params.n for request in client.requests] == [2]
        assert texts(app)[0] == "one"
        await settle(pilot)
        client.gate = asyncio.Semaphore(0)
        type_ahead("enter", *"three", "enter", *"four")
        await told(pilot, "still answering")
        await until(pilot, lambda: app.pane.prompt.text == "three\nfour")
        client.gate = None
        await pilot.press("escape")
        await settle(pilot)

    client = FakeClient()
    play(client, story)


def test_enter_twice_does_once_what_a_command_says() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        app.pane.prompt.put("/new")
        for _ in range(3):
            app.post_message(events.Key("enter", None))
        await until(pilot, lambda: len(app.panes) == 2)
        await calm(pilot)
        assert len(app.panes) == 2

    play(FakeClient(), story)


def test_a_command_that_is_refused_comes_back_to_be_put_right() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        for text in ("/frob", "/set top_p 7", "/save ~nobody-here/x.md"):
            await say(pilot, text)
            await until(pilot, lambda text=text: app.pane.prompt.text == text)

    play(FakeClient(), story)


def test_new_lines_are_typed_and_the_prompt_grows() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await pilot.press("a", "ctrl+j", "b", "alt+enter", "c")
        await until(pilot, lambda: app.pane.prompt.text == "a\nb\nc")
        await until(pilot, lambda: app.pane.prompt.size.height == 3)
        await pilot.press("enter")
        await settle(pilot)
        assert texts(app)[0] == "a\nb\nc"

    play(FakeClient(), story)


def test_what_was_sent_before_comes_back_with_the_arrows_and_the_draft_is_kept() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        for text in ("one", "two\nlines"):
            await say(pilot, text)
            await settle(pilot)
        await pilot.press(*"draft", "up")
        assert app.pane.prompt.text == "two\nlines"
        await pilot.press("up", "up")
        assert app.pane.prompt.text == "one"
        await pilot.press("down", "down", "down")
        assert app.pane.prompt.text == "draft"

    play(FakeClient(), story)


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
def test_an_answer_stops_at_once_and_what_was_said_stays(key: str) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        client.gate = asyncio.Semaphore(1)
        await say(pilot, "why?")
        await until(pilot, lambda: texts(app)[-1:] == ["Hello "])
        await pilot.press(key)
        await settle(pilot)
        assert app.pane.conversation.path()[-1].status == "stopped"
        assert client.num_aborted == 1
        assert "stopped" in screen_text(app)
        client.gate = None
        await say(pilot, "again")
        await settle(pilot)
        assert texts(app)[-1] == "Hello there."

    client = FakeClient()
    play(client, story)


def test_a_failed_answer_says_why_and_can_be_asked_again() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "why?")
        await settle(pilot)
        shown = screen_text(app)
        assert "Hello there." in shown
        assert "the endpoint [is] gone (start it)" in shown
        client.error = None
        await say(pilot, "/retry")
        await settle(pilot)
        assert "← 2/2 →" in screen_text(app)
        assert app.pane.conversation.path()[-1].status == "done"

    client = FakeClient()
    client.error = failed("the endpoint [is] gone", "start it")
    play(client, story)


def test_versions_of_an_answer_are_turned_with_the_arrows() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "why?")
        await settle(pilot)
        client.pieces = ["Other."]
        await pilot.press("ctrl+up")
        await pilot.press("r")
        await settle(pilot)
        assert texts(app) == ["why?", "Other."]
        await pilot.press("ctrl+up", "left")
        await until(pilot, lambda: texts(app) == ["why?", "Hello there."])
        await until(pilot, lambda: "Other." not in screen_text(app))
        await until(pilot, lambda: app.query(MessageView).last().has_focus)
        await pilot.press("right")
        await until(pilot, lambda: texts(app) == ["why?", "Other."])

    client = FakeClient()
    play(client, story)


def test_a_question_is_edited_and_sent_again() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "one")
        await settle(pilot)
        await say(pilot, "two")
        await settle(pilot)
        await pilot.press("ctrl+up", "up", "up", "up", "e")
        await until(pilot, lambda: app.pane.prompt.text == "one")
        await shows(pilot, "editing")
        await say(pilot, "ONE")
        await settle(pilot)
        assert texts(app) == ["ONE", "Hello there."]
        assert app.pane.conversation.versions(1) == [1, 5]

    play(FakeClient(), story)


def test_editing_can_be_left() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "one")
        await settle(pilot)
        await say(pilot, "/edit")
        await pilot.press("escape")
        assert app.pane.prompt.text == ""
        await say(pilot, "two")
        await settle(pilot)
        assert len(texts(app)) == 4

    play(FakeClient(), story)


def test_candidates_stand_side_by_side_and_one_is_picked() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "/n 3 a name?")
        await settle(pilot)
        views = [view for view in app.query(MessageView) if view.has_class("-candidate")]
        assert len(views) == 3
        assert len({view.region.y for view in views}) == 1
        assert len({view.region.x for view in views}) == 3
        await pilot.press("ctrl+up", "left", "enter")
        await settle(pilot)
        assert texts(app) == ["a name?", "Hello [1]there.[1]"]
        assert "← 2/3 →" in screen_text(app)
        assert app.pane.prompt.has_focus
        await say(pilot, "go on")
        await settle(pilot)
        assert client.requests[-1].messages[1]["content"] == "Hello [1]there.[1]"

    client = FakeClient()
    play(client, story)


def test_a_candidate_is_picked_while_all_of_them_are_written() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        client.gate = asyncio.Semaphore(1)
        await say(pilot, "/n 3 a name?")
        await shows(pilot, "Hello [2]")
        await pilot.press("ctrl+up", "enter")
        await shows(pilot, "← 3/3 →")
        client.gate.release()
        await settle(pilot)
        assert texts(app) == ["a name?", "Hello [2]there.[2]"]
        assert "picks" not in screen_text(app)
        await pilot.press("ctrl+up", "left")
        await shows(pilot, "Hello [1]there.[1]")

    client = FakeClient()
    play(client, story)


def test_of_many_candidates_those_are_shown_that_can_be_read() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "/n 64 a name?")
        await settle(pilot)
        await shows(pilot, "[1/64]")
        fit = len(app.query(".-candidate"))
        assert 1 < fit < 8
        await pilot.press("ctrl+up")
        steps = [("right", 1), ("right", 2), ("left", 1), ("left", 0), ("left", -1)]
        for key, beyond in steps:
            await pilot.press(key)
            await shows(pilot, f"[{fit + beyond}/64]")
            assert len(app.query(".-candidate")) == fit
        await pilot.press("enter")
        await settle(pilot)
        assert texts(app)[1] == f"Hello [{fit - 2}]there.[{fit - 2}]"
        await pilot.press("ctrl+up", "right")
        await shows(pilot, f"← {fit}/64 →")

    play(FakeClient(), story)


def test_an_earlier_version_is_shown_with_what_came_after_it_while_there_are_candidates() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        for text in ("one", "/retry", "/n 2 two"):
            await say(pilot, text)
            await settle(pilot)
        app.query(MessageView)[1].focus()
        await pilot.press("left")
        await shows(pilot, "← 1/2 →")
        assert texts(app) == ["one", "Hello there."]
        await pilot.press("right")
        await shows(pilot, "Hello [0]there.[0]")

    play(FakeClient(), story)


def test_going_on_without_picking_takes_the_first_candidate() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "/n 2 a name?")
        await settle(pilot)
        await say(pilot, "go on")
        await settle(pilot)
        assert client.requests[-1].messages[1]["content"] == "Hello [0]there.[0]"

    client = FakeClient()
    play(client, story)


def test_reasoning_is_folded_and_opens() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "why?")
        await settle(pilot)
        shown = screen_text(app)
        assert "reasoning" in shown
        assert "secret thought" not in shown
        assert "Because." in shown
        await pilot.press("ctrl+up", "space")
        await shows(pilot, "secret thought")
        assert not app.query_one(Collapsible).collapsed

    play(FakeClient(["<thi", "nk>\nsecret ", "thought\n</th", "ink>\n\nBecause."]), story)


CODE = "Here:\n\n```python\ndef f(x):\n    return x + 1\n```\n\nand so on."


def test_code_is_shown_as_code_and_copied() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "code?")
        await settle(pilot)
        assert re.search(r"def f\(x\):\s", screen_text(app))
        assert "```" not in screen_text(app)
        await pilot.press("ctrl+up", "y")
        assert app.clipboard == "def f(x):\n    return x + 1"
        await pilot.press("c")
        assert app.clipboard == CODE
        await say(pilot, "/copy code")
        await until(pilot, lambda: app.clipboard == "def f(x):\n    return x + 1")

    play(FakeClient([CODE[i : i + 3] for i in range(0, len(CODE), 3)]), story)


def test_a_code_block_is_copied_by_its_number() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "code?")
        await settle(pilot)
        await say(pilot, "/copy code 1")
        await until(pilot, lambda: app.clipboard == "one")
        await say(pilot, "/copy code")
        await until(pilot, lambda: app.clipboard == "two")
        await say(pilot, "/copy code 3")
        await told(pilot, "3 must be between 1 and 2")

    play(FakeClient(["```\none\n```\n\n```\ntwo\n```"]), story)


def test_the_status_line_tells_how_soon_an_answer_began() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        client.gate = asyncio.Semaphore(1)
        await say(pilot, "why?")
        await shows(pilot, "first in 0.2 s")
        client.gate.release()
        await settle(pilot)
        assert "first in" not in screen_text(app)

    client = FakeClient()
    play(client, story)


LONG = "\n\n".join(f"Paragraph {number}, with *some* text." for number in range(60))


def test_who_reads_above_stays_there_while_the_answer_grows() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        client.gate = asyncio.Semaphore(40)
        await say(pilot, "long?")
        transcript = app.pane.transcript
        await until(pilot, lambda: "Paragraph 39" in texts(app)[-1])
        await until(pilot, lambda: transcript.max_scroll_y > 40)
        await until(pilot, lambda: transcript.scroll_y == transcript.max_scroll_y)
        await pilot.press("pageup", "pageup")
        await until(pilot, lambda: transcript.scroll_y < transcript.max_scroll_y)
        client.gate = None
        app.pane._work.cancel() if app.pane._work else None
        await settle(pilot)
        client.pieces = [LONG]
        await app.pane.retry(app.pane.conversation.path()[-1].message_id)
        await settle(pilot)
        await until(pilot, lambda: transcript.scroll_y == transcript.max_scroll_y > 40)
        await pilot.press("pageup")
        await until(pilot, lambda: transcript.scroll_y < transcript.max_scroll_y)
        place, height = transcript.scroll_y, transcript.max_scroll_y
        view = app.query(MessageView).last()
        view.show(view.message.__class__(**_grown(view)), (1, 1))
        await until(pilot, lambda: transcript.max_scroll_y > height)
        await calm(pilot)
        assert transcript.scroll_y == place
        await pilot.press(*["pagedown"] * 9)
        await until(pilot, lambda: transcript.scroll_y == transcript.max_scroll_y)

    client = FakeClient([f"{each}\n\n" for each in LONG.split("\n\n")])
    play(client, story)


def _grown(view: MessageView) -> dict[str, object]:
    from dataclasses import fields

    values = {each.name: getattr(view.message, each.name) for each in fields(view.message)}
    return {**values, "text": view.message.text + "\n\nmore\n\nand more"}


def test_a_resize_while_streaming_loses_nothing() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        client.gate = asyncio.Semaphore(0)
        await say(pilot, "why?")
        sizes = ((80, 24), (200, 60), (20, 5), (3, 2), (120, 40))
        for count, size in enumerate(sizes, 1):
            client.gate.release()
            await pilot.resize_terminal(*size)
            await until(pilot, lambda: app.size == size)  # noqa: B023
            await until(pilot, lambda: len(texts(app)[-1].split()) == count)  # noqa: B023
        client.gate = None
        app.pane.stop()
        await settle(pilot)
        assert texts(app)[-1] == "one two three four five "
        await shows(pilot, "one two three four five")

    client = FakeClient(["one ", "two ", "three ", "four ", "five ", "six"])
    play(client, story)


def test_what_is_asked_while_the_model_loads_is_answered_when_it_is_there() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        assert client.start_gate is not None
        await shows(pilot, "weights", "40%")
        await say(pilot, "why?")
        await until(pilot, lambda: app.pane.is_busy)
        assert client.requests == []
        await shows(pilot, "assistant  waiting for a model")
        client.start_gate.set()
        await settle(pilot)
        assert texts(app)[-1] == "Hello there."
        await shows(pilot, "fake  2 tokens")

    client = FakeClient()
    client.start_gate = asyncio.Event()
    play(client, story)


@pytest.mark.parametrize("place", ["ctrl+up", "f3"])
def test_what_is_typed_where_nothing_takes_it_goes_to_the_prompt(place: str) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "why?")
        await settle(pilot)
        await pilot.press(place)
        await until(pilot, lambda: not app.pane.prompt.has_focus)
        await pilot.press("h", "e")
        await until(pilot, lambda: app.pane.prompt.text == "he")
        assert app.pane.prompt.has_focus

    play(FakeClient(), story)


def test_a_short_conversation_is_at_the_top() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "why?")
        await settle(pilot)
        assert app.query(MessageView).first().region.y == app.pane.transcript.region.y

    play(FakeClient(), story)


def test_notices_do_not_cover_the_prompt() -> None:
    async def run() -> None:
        client = FakeClient()
        app = ChatApp(ChatOptions(lambda _name: client, "fake"))
        async with app.run_test(size=(80, 24), notifications=True) as pilot:
            app.tell("a notice")
            await shows(pilot, "a notice")
            assert "a notice" in screen_text(app).split("\n")[0]
            app.action_leave()
            await until(pilot, lambda: app.return_code is not None)

    asyncio.run(run())


def test_an_empty_draft_is_not_sent() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await pilot.press("enter", "space", "ctrl+j", "enter")
        await calm(pilot)
        assert texts(app) == []

    play(FakeClient(), story)
