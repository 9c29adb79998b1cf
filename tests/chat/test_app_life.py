"""How the chat begins and ends: picking, loading, failing, leaving, and every size of screen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from pagedmlx import hub
from pagedmlx.chat.app import ChatApp
from pagedmlx.chat.client import ChatClient
from pagedmlx.chat.demo import DemoClient
from pagedmlx.chat.scene import play as play_scene
from pagedmlx.chat.screens.page import PageScreen
from pagedmlx.chat.screens.picker import PickerScreen
from pagedmlx.core.sequence import Sequence
from tests.support.chat import (
    FakeClient,
    calm,
    engine_client,
    failed,
    running,
    say,
    screen_text,
    settle,
    shows,
    told,
    until,
)
from tests.support.engines import LETTERS

Make = Callable[[str], ChatClient]
Story = Callable[[ChatApp, Pilot[int]], Awaitable[None]]


def play(make: Make, story: Story, **options: Any) -> None:
    async def run() -> None:
        async with running(make, **options) as (app, pilot):
            await story(app, pilot)

    asyncio.run(run())


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        hub.ModelEntry("owner/[small]", "hub", 3 * 2**30, __file__, removable=True)  # type: ignore[arg-type]
    ]
    monkeypatch.setattr(hub, "list_models", lambda: entries)


async def choices(app: ChatApp, pilot: Pilot[int]) -> OptionList:
    await until(pilot, lambda: isinstance(app.screen, PickerScreen))
    found = app.screen.query_one(OptionList)
    await until(pilot, lambda: found.option_count)
    await calm(pilot)
    return found


@pytest.mark.usefixtures("models")
def test_without_a_model_one_is_chosen_from_those_that_are_here() -> None:
    made: list[str] = []

    def make(name: str) -> ChatClient:
        made.append(name)
        return FakeClient(name=name)

    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await choices(app, pilot)
        await shows(pilot, "smollm2", "owner/[small]", "3.0 GiB")
        await pilot.press("down", "enter")
        await until(pilot, lambda: app.client is not None)
        assert made == ["owner/[small]"]
        await shows(pilot, "owner/[small]")

    play(make, story, model=None)


@pytest.mark.usefixtures("models")
def test_a_model_can_be_named_and_another_one_taken_later() -> None:
    clients: list[FakeClient] = []

    def make(name: str) -> ChatClient:
        clients.append(FakeClient(name=name))
        return clients[-1]

    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await choices(app, pilot)
        app.screen.query_one(Input).focus()
        await pilot.press(*"a/b", "enter")
        await until(pilot, lambda: app.client is not None)
        await say(pilot, "one")
        await settle(pilot)
        await say(pilot, "/model c/d")
        await until(pilot, lambda: len(clients) == 2 and app.client is clients[1])
        assert clients[0].num_closes == 1
        await say(pilot, "two")
        await settle(pilot)
        assert [each["content"] for each in clients[1].requests[0].messages][::2] == ["one", "two"]

    play(make, story, model=None)


@pytest.mark.usefixtures("models")
def test_a_model_that_fails_to_load_is_told_and_another_one_can_be_chosen() -> None:
    def make(name: str) -> ChatClient:
        client = FakeClient(name=name)
        if name == "broken":
            client.start_error = failed("config.json is [missing]", "pull it again")
        return client

    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        app.pane.prompt.put("why?")
        await choices(app, pilot)
        await shows(pilot, "broken: config.json is [missing] (pull it again)")
        await pilot.press("enter")
        await until(pilot, lambda: app.client is not None)
        assert app.pane.prompt.text == "why?"
        await say(pilot, "why?")
        await settle(pilot)
        assert "Hello there." in screen_text(app)

    play(make, story, model="broken")


def test_an_endpoint_that_is_not_there_is_told_and_tried_again() -> None:
    client = FakeClient()
    client.start_error = failed("http://host doesn't answer")

    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await shows(pilot, "doesn't answer")
        client.start_error = None
        await say(pilot, "/model")
        await until(pilot, lambda: app.client is not None)
        await until(pilot, lambda: "doesn't answer" not in screen_text(app))

    play(lambda _: client, story, can_pick=False, model="")


def test_ctrl_c_twice_or_quit_leaves() -> None:
    async def twice(app: ChatApp, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: app.client is not None)
        await pilot.press("ctrl+c")
        await told(pilot, "once more")
        await pilot.press("ctrl+c")
        await until(pilot, lambda: app._exit)

    async def command(app: ChatApp, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: app.client is not None)
        await say(pilot, "/quit")
        await until(pilot, lambda: app._exit)

    for story in (twice, command):
        client = FakeClient()
        play(lambda _, client=client: client, story)
        assert client.num_closes == 1


def slow_letter(_sequence: Sequence) -> int:
    time.sleep(0.01)
    return LETTERS[0]


def test_leaving_in_the_middle_of_an_answer_ends_the_engine_and_keeps_the_text() -> None:
    client = engine_client(choose=slow_letter)

    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: app.client is not None)
        await say(pilot, "why?")
        await until(pilot, lambda: len(app.pane.conversation.path()[-1].text) > 3)
        store, conversation = app.store, app.pane.conversation
        store.close = lambda: None  # type: ignore[method-assign]
        await pilot.press("ctrl+q")
        await until(pilot, lambda: app._exit)
        assert not app.left_behind
        saved = store.load(conversation.conversation_id).path()
        assert saved[-1].status == "stopped"
        assert saved[-1].text == conversation.path()[-1].text

    play(lambda _: client, story)


def test_leaving_while_the_model_loads_does_not_wait_for_it() -> None:
    client = FakeClient()
    client.start_gate = asyncio.Event()

    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: app._loading.stage is not None)
        await pilot.press("ctrl+q")
        await until(pilot, lambda: app._exit)
        assert client.num_closes == 1

    play(lambda _: client, story)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_the_demo_s_scene_fills_every_screen(size: tuple[int, int]) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: len(app.panes) == 3 and app.panes[2].is_busy)
        shown = await shows(pilot, "Tidepool", "Lighthouse", "Driftwood", "tok/s", "[3]")
        assert "Driftwood" in app.export_screenshot()
        lines = shown.split("\n")
        assert len(lines) == size[1]
        assert "Quit" in lines[-1]
        assert any(line.strip().startswith("╭") for line in lines)
        await settle(pilot)

    async def quickly(app: ChatApp) -> None:
        await play_scene(app, pause_s=0.01)

    play(lambda _: DemoClient(0.004), story, size=size, scene=quickly)


@pytest.mark.parametrize("size", [(1, 1), (10, 3), (30, 8), (60, 17)])
def test_a_screen_that_is_too_small_breaks_nothing(size: tuple[int, int]) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: app.client is not None)
        await say(pilot, "why?")
        await settle(pilot)
        await pilot.press("f1", "escape", "f4", "escape", "f3", "f2")
        await pilot.resize_terminal(120, 40)
        await shows(pilot, "Hello there.")

    play(lambda _: FakeClient(), story, size=size)


@pytest.mark.parametrize("size", [(48, 20), (2, 20)])
def test_a_terminal_that_becomes_narrow_at_once_breaks_nothing(size: tuple[int, int]) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: app.client is not None)
        await pilot.resize_terminal(*size)
        await until(pilot, lambda: app.size == size)
        await calm(pilot)
        app.pane.prompt.refresh()
        await calm(pilot)
        await pilot.resize_terminal(120, 40)
        await shows(pilot, "Message, or / for commands")

    play(lambda _: FakeClient(), story, size=(120, 40))


def test_help_lists_every_key_and_command() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, PageScreen))
        await shows(pilot, "Ctrl+J", "/branch", "/quit", "Ctrl+T, F8", "double-click")
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, PageScreen))

    play(lambda _: FakeClient(), story, size=(120, 70))


def test_the_command_palette_has_what_the_chat_can_do() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        titles = {each.title for each in app.get_system_commands(app.screen)}
        assert {"New conversation", "Model", "Settings", "Branch", "Theme"} <= titles

    play(lambda _: FakeClient(), story)


def test_the_theme_is_as_it_was_the_last_time(tmp_path: Path) -> None:
    async def change(app: ChatApp, pilot: Pilot[int]) -> None:
        app.theme = "textual-light"
        await until(pilot, lambda: app.store.setting("theme") == "textual-light")

    async def look(app: ChatApp, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: app.theme == "textual-light")

    for story in (change, look):
        play(lambda _: FakeClient(), story, store_path=tmp_path / "chat.db")
