"""Several conversations at once: streaming side by side, branches, and what is saved of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from pagedmlx.chat.app import ChatApp
from pagedmlx.chat.screens.saved import SavedScreen
from pagedmlx.chat.screens.settings import SettingsScreen
from pagedmlx.chat.store import Store
from pagedmlx.core.sequence import Sequence
from tests.support.chat import (
    FakeClient,
    engine_client,
    notices,
    running,
    say,
    screen_text,
    settle,
    until,
)
from tests.support.engines import EOS, LETTERS

Story = Callable[[ChatApp, Pilot[int]], Awaitable[None]]


def play(client: FakeClient, story: Story, store_path: Path | None = None) -> None:
    async def run() -> None:
        async with running(client, store_path=store_path) as (app, pilot):
            await until(pilot, lambda: app.client is not None)
            await story(app, pilot)

    asyncio.run(run())


def test_a_second_conversation_is_answered_while_the_first_streams() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        client.gate = asyncio.Semaphore(0)
        await say(pilot, "first?")
        await pilot.press("ctrl+t")
        await until(pilot, lambda: len(app.panes) == 2)
        await say(pilot, "second?")
        await until(pilot, lambda: len(client.requests) == 2)
        assert all(pane.is_busy for pane in app.panes)
        assert "A ▸ first?" in screen_text(app)
        for _ in range(4):
            client.gate.release()
        await settle(pilot)
        answers = [pane.conversation.path()[-1].text for pane in app.panes]
        assert answers == ["Hello there."] * 2
        assert "A first? has its answer" in notices(app)
        await pilot.press("f6")
        await until(pilot, lambda: "first?" in screen_text(app).split("\n", 3)[3])
        assert "Hello there." in screen_text(app)

    client = FakeClient()
    play(client, story)


def test_a_branch_goes_on_in_a_tab_of_its_own() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        for text in ("one", "two"):
            await say(pilot, text)
            await settle(pilot)
        await pilot.press("ctrl+up", "up", "up", "b")
        await until(pilot, lambda: len(app.panes) == 2)
        await until(pilot, lambda: app.pane is app.panes[1])
        branch = app.pane
        assert [each.text for each in branch.conversation.path()] == ["one", "Hello there."]
        await say(pilot, "three")
        await settle(pilot)
        sent = [each["content"] for each in client.requests[-1].messages]
        assert sent == ["one", "Hello there.", "three"]
        assert len(app.panes[0].conversation.path()) == 4

    client = FakeClient()
    play(client, story)


def slowly(sequence: Sequence) -> int:
    time.sleep(0.003)
    return EOS if sequence.num_output_tokens == 60 else LETTERS[0]


def test_a_branch_shares_its_blocks_with_where_it_comes_from() -> None:
    async def run() -> None:
        client = engine_client(choose=slowly, num_blocks=128)
        async with running(client) as (app, pilot):
            await until(pilot, lambda: app.client is not None)
            await say(pilot, "one")
            await settle(pilot)
            first = app.pane
            await first.branch()
            await first.send("two")
            await app.pane.send("three")
            most = 0
            while first.is_busy or app.pane.is_busy:
                snapshot = await client.snapshot()
                assert snapshot is not None
                most = max(most, snapshot.stats.num_shared_blocks)
                await asyncio.sleep(0)
            assert most >= 15
            assert app.pane.progress.num_cached_tokens >= 60

    asyncio.run(run())


def test_conversations_come_back_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"

    async def first(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "/set temp 0.25")
        await say(pilot, "/system Be brief.")
        await say(pilot, "why is the sky blue?")
        await settle(pilot)

    async def second(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "/load sky")
        await until(pilot, lambda: isinstance(app.screen, SavedScreen))
        await pilot.pause()
        assert "why is the sky blue?" in screen_text(app)
        await pilot.press("enter")
        await until(pilot, lambda: len(app.panes) == 2)
        await until(pilot, lambda: "Hello there." in screen_text(app))
        assert app.pane.conversation.params.temperature == 0.25
        await say(pilot, "and green?")
        await settle(pilot)
        assert [each["content"] for each in client.requests[0].messages] == [
            "Be brief.",
            "why is the sky blue?",
            "Hello there.",
            "and green?",
        ]

    play(FakeClient(), first, path)
    client = FakeClient()
    play(client, second, path)
    store = Store(path)
    assert [each.num_messages for each in store.search()] == [4]
    store.close()


def test_the_list_of_saved_ones_narrows_with_each_letter_and_opens_one_only_once(
    tmp_path: Path,
) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        for text in ("alpha", "beta"):
            await say(pilot, text)
            await settle(pilot)
            await pilot.press("ctrl+t")
            await pilot.pause()
        await pilot.press("f5")
        await until(pilot, lambda: isinstance(app.screen, SavedScreen))
        await pilot.pause()
        found = app.screen.query_one(OptionList)
        assert found.option_count == 2
        await pilot.press(*"bet")
        await pilot.pause()
        assert found.option_count == 1
        await pilot.press("down", "enter")
        await until(pilot, lambda: not isinstance(app.screen, SavedScreen))
        await pilot.pause()
        assert len(app.panes) == 3
        assert app.pane.conversation.shown_title == "beta"
        await pilot.press("f5")
        await pilot.press(*"zzz")
        await pilot.pause()
        assert "nothing is found" in screen_text(app)
        await pilot.press("escape")

    play(FakeClient(), story, tmp_path / "chat.db")


def test_rename_export_clear_and_delete(tmp_path: Path) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "why?")
        await settle(pilot)
        await say(pilot, "/rename The [sky]")
        await pilot.pause()
        assert "The [sky]" in screen_text(app)
        await say(pilot, f"/save {tmp_path / 'talk.json'}")
        await pilot.pause()
        assert json.loads((tmp_path / "talk.json").read_text())["title"] == "The [sky]"
        await say(pilot, f"/save {tmp_path / 'missing' / 'talk.md'}")
        await pilot.pause()
        assert "can't be written" in notices(app)[-1]
        await say(pilot, "/clear")
        await pilot.pause()
        assert app.pane.conversation.path() == []
        await say(pilot, "/delete")
        await until(pilot, lambda: app.pane.conversation.title == "")
        assert app.store.search() == []

    play(FakeClient(), story, tmp_path / "chat.db")


def test_a_full_disk_is_told_once_and_loses_no_text(tmp_path: Path) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "one")
        await settle(pilot)
        (pages,) = app.store._db.execute("PRAGMA page_count").fetchone()
        app.store._db.execute(f"PRAGMA max_page_count = {pages}")
        client.pieces = ["long " * 20_000]
        await say(pilot, "two")
        await settle(pilot)
        told = [text for text in notices(app) if "disk is full" in text]
        assert len(told) == 1
        assert "long long" in screen_text(app)
        app.store._db.execute("PRAGMA max_page_count = 100000")
        client.pieces = ["short"]
        await say(pilot, "three")
        await settle(pilot)
        saved = app.store.load(app.pane.conversation.conversation_id)
        assert [len(each.text) for each in saved.path()] == [3, 12, 3, 100_000, 5, 5]

    client = FakeClient()
    play(client, story, tmp_path / "chat.db")


def test_a_store_that_cannot_be_opened_is_told_and_the_chat_works(tmp_path: Path) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await pilot.pause()
        assert any("will not be kept" in text for text in notices(app))
        await say(pilot, "why?")
        await settle(pilot)
        assert "Hello there." in screen_text(app)

    (tmp_path / "chat.db").write_text("something else " * 100)
    play(FakeClient(), story, tmp_path / "chat.db")


def test_tabs_close_and_the_last_one_is_followed_by_a_new_one() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        client.gate = asyncio.Semaphore(0)
        await say(pilot, "one")
        await until(pilot, lambda: client.requests)
        await pilot.press("f8")
        await until(pilot, lambda: app.pane.conversation.path() == [])
        assert client.num_aborted == 1
        assert len(app.panes) == 1

    client = FakeClient()
    play(client, story)


def test_settings_are_explained_and_a_value_that_cannot_be_is_refused() -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "/set")
        await until(pilot, lambda: isinstance(app.screen, SettingsScreen))
        await pilot.pause()
        assert "0 always takes the likeliest token" in screen_text(app)
        app.screen.query_one("#temperature", Input).value = "hot"
        await pilot.pause()
        assert "'hot' is not a number" in screen_text(app)
        app.screen.query_one("#temperature", Input).value = "0.1"
        app.screen.query_one("#n", Input).value = "2"
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, SettingsScreen))
        await pilot.pause()
        assert app.pane.conversation.params.temperature == 0.1
        assert "2 candidates" in screen_text(app)

    play(FakeClient(), story)


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("/hepl", "did you mean /help?"),
        ("/set temp warm", "'warm' is not a number"),
        ("/set", ""),
        ("/n many", "'many' is not a whole number"),
        ("/n 99999 why?", "must be between"),
        ("/rename", "needs a title"),
        ("/retry", "nothing to answer yet"),
        ("/edit", "nothing to edit yet"),
        ("/branch", "nothing to branch from yet"),
        ("/copy", "nothing to copy yet"),
        ("/stats", "nothing tells what the engine has counted"),
        ("/save", "saved in memory only"),
    ],
)
def test_a_command_that_cannot_be_done_says_why(command: str, answer: str) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, command)
        await pilot.pause()
        assert not answer or any(answer in text for text in notices(app))
        assert client.requests == []

    client = FakeClient()
    play(client, story)


def test_the_model_s_own_sampling_is_followed_unless_the_user_said_otherwise() -> None:
    async def run(given: frozenset[str]) -> float:
        client = FakeClient()
        client.defaults = {"temperature": 0.6, "top_k": 20}
        async with running(client, given=given) as (app, pilot):
            await until(pilot, lambda: app.client is not None)
            await say(pilot, "why?")
            await settle(pilot)
            assert client.requests[0].params.top_k == 20
            return client.requests[0].params.temperature

    assert asyncio.run(run(frozenset())) == 0.6
    assert asyncio.run(run(frozenset({"temperature"}))) == 0.7
