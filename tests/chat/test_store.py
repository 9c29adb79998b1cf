"""The store loses nothing, finds what was said, and says so when it can't write."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from pagedmlx.chat.session import ASSISTANT, DONE, STOPPED, USER, Conversation
from pagedmlx.chat.store import Store, StoreError, default_path, export, to_markdown
from pagedmlx.core.sampling_params import SamplingParams

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "chat.db"


def talk(*texts: str) -> Conversation:
    conversation = Conversation(
        system="Be *brief*.", params=SamplingParams(temperature=0.3, stop=("END",), seed=5)
    )
    for place, text in enumerate(texts):
        message = conversation.add(ASSISTANT if place % 2 else USER, text)
        conversation.change(message.message_id, status=DONE, num_tokens=place)
    return conversation


def test_a_conversation_comes_back_as_it_was(path: Path) -> None:
    conversation = talk("Grüße 🦊 [red]", "a\tb\n\n```\nx\n```")
    conversation.add(ASSISTANT, "other", parent_id=1)
    conversation.change(3, status="failed", error="no memory")
    store = Store(path)
    store.save(conversation, 10.0)
    assert conversation.changed == set()
    store.close()
    store = Store(path)
    found = store.load(conversation.conversation_id)
    assert found.messages == conversation.messages
    assert found.path() == conversation.path()
    assert (found.system, found.params) == (conversation.system, conversation.params)
    assert found.created_s == conversation.created_s
    store.close()


def test_only_the_user_may_read_the_files(path: Path) -> None:
    store = Store(path)
    store.save(talk("a secret"), 1.0)
    files = list(path.parent.glob(f"{path.name}*"))
    assert len(files) > 1  # what isn't in the file yet lies beside it
    assert all(each.stat().st_mode & 0o077 == 0 for each in files)
    store.close()


def test_a_crash_loses_only_what_was_not_saved(path: Path) -> None:
    code = (
        "import os, sys, pathlib\n"
        "from pagedmlx.chat.session import *\n"
        "from pagedmlx.chat.store import Store\n"
        "store = Store(pathlib.Path(sys.argv[1]))\n"
        "c = Conversation(conversation_id='x')\n"
        "c.add(USER, 'question'); a = c.add(ASSISTANT, 'half an ans')\n"
        "store.save(c, 1.0)\n"
        "c.change(a.message_id, text='half an answer')\n"
        "os._exit(9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", code, path], env=environment, check=False)
    store = Store(path)
    found = store.load("x").path()
    assert [each.text for each in found] == ["question", "half an ans"]
    assert found[1].status == STOPPED
    store.close()


def test_words_are_found_in_titles_and_messages_newest_first(path: Path) -> None:
    store = Store(path)
    for place, texts in enumerate((("sky", "blue"), ("100% sure", "no_t"), ("sea", "Blue green"))):
        store.save(talk(*texts), float(place))
    assert [each.title for each in store.search()] == ["sea", "100% sure", "sky"]
    assert [each.title for each in store.search("blue")] == ["sea", "sky"]
    assert [each.title for each in store.search("blue  sk")] == ["sky"]
    assert [each.title for each in store.search("100%")] == ["100% sure"]
    assert store.search("o_t")[0].excerpt == "no_t"
    assert store.search("n%t") == []
    assert store.search("'; DROP TABLE messages; --") == []
    assert store.search("blue")[0].num_messages == 2
    store.close()


def test_a_deleted_conversation_is_gone(path: Path) -> None:
    store = Store(path)
    conversation = talk("a", "b")
    store.save(conversation, 1.0)
    store.delete(conversation.conversation_id)
    assert store.search() == []
    with pytest.raises(StoreError, match="there is no conversation"):
        store.load(conversation.conversation_id)
    store.close()


def test_a_full_disk_is_told_and_nothing_is_half_written(path: Path) -> None:
    store = Store(path)
    conversation = talk("a", "b")
    store.save(conversation, 1.0)
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    conversation.change(2, text="long " * 50_000)
    with pytest.raises(StoreError, match="can't be saved: database or disk is full"):
        store.save(conversation, 2.0)
    assert conversation.changed == {2}
    assert store.load(conversation.conversation_id).messages[2].text == "b"
    store._db.execute("PRAGMA max_page_count = 100000")
    store.save(conversation, 3.0)
    assert store.load(conversation.conversation_id).messages[2].text == "long " * 50_000
    store.close()


def test_a_file_that_is_no_database_or_of_a_newer_version_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("not a database, but somebody's text " * 50)
    with pytest.raises(StoreError, match="can't be opened"):
        Store(path)
    assert path.read_text().startswith("not a database")
    path.unlink()
    newer = sqlite3.connect(path)
    newer.execute("PRAGMA user_version = 9")
    newer.close()
    with pytest.raises(StoreError, match="newer pagedmlx"):
        Store(path)


def test_two_programs_can_use_one_file(path: Path) -> None:
    first, second = Store(path), Store(path)
    first.save(talk("a"), 1.0)
    second.save(talk("b"), 2.0)
    assert len(first.search()) == 2
    first.close()
    second.close()


def test_exports_are_markdown_or_json(tmp_path: Path) -> None:
    conversation = talk("Why?", "Because.")
    conversation.add(ASSISTANT, "Another reason.", parent_id=1)
    export(conversation, tmp_path / "talk.md")
    text = (tmp_path / "talk.md").read_text()
    assert text == to_markdown(conversation)
    assert "## User\n\nWhy?" in text
    assert "Another reason." in text
    assert "Because." not in text
    export(conversation, tmp_path / "talk.json")
    value = json.loads((tmp_path / "talk.json").read_text())
    assert value["messages"][1:] == [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Another reason."},
    ]
    assert [each["text"] for each in value["tree"]] == ["Why?", "Because.", "Another reason."]


def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="can't be written"):
        export(talk("a"), tmp_path / "missing" / "talk.md")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="can't be written"):
        export(talk("a"), tmp_path / "folder")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_the_file_is_where_the_desktop_wants_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_path() == Path("/data/pagedmlx/chat.db")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default_path() == Path.home() / ".local/share/pagedmlx/chat.db"


def test_settings_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "chat.db")
    assert store.setting("theme") == ""
    store.keep_setting("theme", "nord")
    store.keep_setting("theme", "gruvbox")
    store.close()
    assert Store(tmp_path / "chat.db").setting("theme") == "gruvbox"


def test_two_windows_on_one_conversation_lose_nothing(path: Path) -> None:
    first, second = Store(path), Store(path)
    began = talk("why?", "because")
    first.save(began, 1.0)
    one, two = (store.load(began.conversation_id) for store in (first, second))
    for store, conversation, said in (
        (first, one, "typed in window one"),
        (second, two, "typed in window two"),
        (first, began, "typed in the window that began"),
    ):
        conversation.add(USER, said)
        conversation.add(ASSISTANT, f"answer to what was {said}")
        store.save(conversation, 2.0)
    found = first.load(began.conversation_id)
    said = {message.text for message in found.messages.values()}
    assert {"typed in window one", "typed in window two"} < said
    assert len(found.messages) == 8
    # All three are versions of the next question, and each still has its answer.
    for message_id in found.versions(found.path()[2].message_id):
        found.choose(message_id)
        assert found.path()[3].text == f"answer to what was {found.path()[2].text}"
    first.close()
    second.close()


def test_what_another_window_went_on_with_is_shown(path: Path) -> None:
    store = Store(path)
    began = talk("why?", "because")
    store.save(began, 1.0)
    other = store.load(began.conversation_id)
    other.add(USER, "and then?")
    store.save(other, 2.0)
    store.save(began, 3.0)
    found = store.load(began.conversation_id).path()
    assert [each.text for each in found] == ["why?", "because", "and then?"]
    store.close()


def test_what_goes_on_after_another_window_has_deleted_it_is_whole(path: Path) -> None:
    store = Store(path)
    conversation = talk("why?", "because")
    store.save(conversation, 1.0)
    store.delete(conversation.conversation_id)
    conversation.add(USER, "and then?")
    store.save(conversation, 2.0)
    assert store.load(conversation.conversation_id).path() == conversation.path()
    store.close()
