"""Several conversations at once: streaming side by side, branches, and what is saved of them."""

from __future__ import annotations

import asyncio
import json
import threading
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
from pagedmlx.chat.widgets.pane import ConversationPane
from pagedmlx.core.sequence import Sequence
from tests.support.chat import (
    WAIT_S,
    FakeClient,
    engine_client,
    notices,
    running,
    say,
    screen_text,
    settle,
    shows,
    told,
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
        await shows(pilot, "A ▸ first?")
        for _ in range(4):
            client.gate.release()
        await settle(pilot)
        answers = [pane.conversation.path()[-1].text for pane in app.panes]
        assert answers == ["Hello there."] * 2
        await told(pilot, "A first? has its answer")
        await pilot.press("f6")
        await until(pilot, lambda: "first?" in screen_text(app).split("\n", 3)[3])
        await shows(pilot, "Hello there.")

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


def test_a_branch_shares_its_blocks_with_where_it_comes_from() -> None:
    is_seen = threading.Event()

    def choose(sequence: Sequence) -> int:
        # The first answer ends by itself, the others when they have been seen together.
        if sequence.num_prompt_tokens > 40:
            time.sleep(0.01)
            return EOS if is_seen.is_set() else LETTERS[0]
        return EOS if sequence.num_output_tokens == 60 else LETTERS[0]

    async def run() -> None:
        client = engine_client(choose=choose, num_blocks=1024, max_model_len=4096)
        async with running(client) as (app, pilot):
            await until(pilot, lambda: app.client is not None)
            await say(pilot, "one")
            await settle(pilot)
            first = app.pane
            await first.branch()
            await first.send("two")
            await app.pane.send("three")
            async with asyncio.timeout(WAIT_S):
                while (snapshot := await client.snapshot()) is not None:
                    if snapshot.stats.num_shared_blocks >= 15:
                        break
                    await asyncio.sleep(0.01)
            is_seen.set()
            await settle(pilot)
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
        await shows(pilot, "why is the sky blue?")
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
        for count, text in enumerate(("alpha", "beta"), 2):
            await say(pilot, text)
            await settle(pilot)
            await pilot.press("ctrl+t")
            await until(pilot, lambda: len(app.panes) == count)  # noqa: B023
            await until(pilot, lambda: app.pane is app.panes[-1])
        await pilot.press("f5")
        await until(pilot, lambda: isinstance(app.screen, SavedScreen))
        found = app.screen.query_one(OptionList)
        await until(pilot, lambda: found.option_count == 2)
        await pilot.press(*"bet")
        await until(pilot, lambda: found.option_count == 1)
        await pilot.press("down", "enter")
        await until(pilot, lambda: not isinstance(app.screen, SavedScreen))
        await until(pilot, lambda: app.pane.conversation.shown_title == "beta")
        assert len(app.panes) == 3
        await pilot.press("f5")
        await until(pilot, lambda: isinstance(app.screen, SavedScreen))
        await pilot.press(*"zzz")
        await shows(pilot, "nothing is found")
        await pilot.press("escape")

    play(FakeClient(), story, tmp_path / "chat.db")


def test_rename_export_clear_and_delete(tmp_path: Path) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "why?")
        await settle(pilot)
        await say(pilot, "/rename The [sky]")
        await shows(pilot, "The [sky]")
        await say(pilot, f"/save {tmp_path / 'talk.json'}")
        await until(pilot, (tmp_path / "talk.json").exists)
        assert json.loads((tmp_path / "talk.json").read_text())["title"] == "The [sky]"
        await say(pilot, f"/save {tmp_path / 'missing' / 'talk.md'}")
        await told(pilot, "can't be written")
        await say(pilot, "/clear")
        await until(pilot, lambda: app.pane.conversation.path() == [])
        await say(pilot, "and now?")
        await settle(pilot)
        assert "2/2" not in screen_text(app)
        await say(pilot, "/delete")
        await told(pilot, "/delete yes deletes “and now?” for good")
        await say(pilot, "/delete yes")
        await until(pilot, lambda: [each.title for each in app.store.search()] == ["The [sky]"])
        await app.open(app.store.load(app.store.search()[0].conversation_id))
        await shows(pilot, "why?")
        await say(pilot, "/delete yes")
        await until(pilot, lambda: app.store.search() == [])

    play(FakeClient(), story, tmp_path / "chat.db")


def test_a_conversation_that_is_deleted_may_be_drawn_until_its_tab_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "why?")
        await settle(pilot)
        close, closed = app.close_pane, list[ConversationPane]()

        async def closing(pane: ConversationPane) -> None:
            pane.draw()
            pane.show_status()
            closed.append(pane)
            await close(pane)

        monkeypatch.setattr(app, "close_pane", closing)
        await say(pilot, "/delete yes")
        await until(pilot, lambda: bool(closed) and closed[0] not in app.panes)
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
        await told(pilot, "disk is full")
        await shows(pilot, "long long")
        assert len([text for text in notices(app) if "disk is full" in text]) == 1
        await shows(pilot, "not saved · fake")
        app.store._db.execute("PRAGMA max_page_count = 100000")
        client.pieces = ["short"]
        await say(pilot, "three")
        await settle(pilot)
        saved = app.store.load(app.pane.conversation.conversation_id)
        assert [len(each.text) for each in saved.path()] == [3, 12, 3, 100_000, 5, 5]
        await until(pilot, lambda: "not saved" not in screen_text(app))

    client = FakeClient()
    play(client, story, tmp_path / "chat.db")


def test_nobody_leaves_unsaved_text_behind_without_being_told(tmp_path: Path) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, "one")
        await settle(pilot)
        app.store._db.execute("PRAGMA query_only = 1")
        await say(pilot, "two")
        await settle(pilot)
        # A closed tab is no way to lose it.
        await say(pilot, "/close")
        await until(pilot, lambda: not app.pane.conversation.messages)
        await pilot.press("ctrl+q")
        await told(pilot, "one conversation is not saved")
        assert not app._leaving
        app.store._db.execute("PRAGMA query_only = 0")
        app._save_all()
        assert app.saving.problem == ""
        (found,) = app.store.search("two")
        assert found.num_messages == 4
        app.store._db.execute("PRAGMA query_only = 1")
        await say(pilot, "three")
        await settle(pilot)
        await pilot.press("ctrl+q", "ctrl+q")
        await until(pilot, lambda: app._exit)
        assert app.saving.problem.startswith("one conversation is not saved")

    play(FakeClient(), story, tmp_path / "chat.db")


def test_a_store_that_cannot_be_opened_is_told_and_the_chat_works(tmp_path: Path) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await told(pilot, "will not be kept")
        await say(pilot, "why?")
        await settle(pilot)
        assert "Hello there." in screen_text(app)
        assert "not saved · fake" in screen_text(app)

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
        await shows(pilot, "0 always takes the likeliest token")
        app.screen.query_one("#temperature", Input).value = "hot"
        await shows(pilot, "'hot' is not a number")
        app.screen.query_one("#temperature", Input).value = "0.1"
        app.screen.query_one("#n", Input).value = "2"
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, SettingsScreen))
        await shows(pilot, "2 candidates")
        assert app.pane.conversation.params.temperature == 0.1

    play(FakeClient(), story)


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("/hepl", "did you mean /help?"),
        ("/set temp warm", "'warm' is not a number"),
        ("/set", ""),
        ("/set max_tokens=40", "max_tokens is 40 from now on"),
        ("/delete that", "is of this conversation, not of 'that'"),
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
def test_a_command_says_what_it_did_or_why_it_cannot(command: str, answer: str) -> None:
    async def story(app: ChatApp, pilot: Pilot[int]) -> None:
        await say(pilot, command)
        if answer:
            await told(pilot, answer)
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
