"""Keeps conversations, and the theme, in one SQLite file; a crash loses at most a second."""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pagedmlx.chat.session import Conversation, Message, restored
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import InvalidRequestError, PagedMLXError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, system TEXT NOT NULL, params TEXT NOT NULL,
    chosen TEXT NOT NULL, created_s REAL NOT NULL, updated_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS messages (
    conversation_id TEXT NOT NULL, message_id INTEGER NOT NULL, parent_id INTEGER NOT NULL,
    role TEXT NOT NULL, text TEXT NOT NULL, status TEXT NOT NULL, error TEXT NOT NULL,
    num_tokens INTEGER NOT NULL, created_s REAL NOT NULL,
    PRIMARY KEY (conversation_id, message_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_VERSION = 1
_BUSY_S = 0.5


class StoreError(PagedMLXError):
    """The conversations can't be read or written."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A conversation in the store, for a list.

    Attributes:
        conversation_id: Its name.
        title: Its title.
        num_messages: Messages in it, all versions counted.
        updated_s: When it was last saved, in seconds since 1970.
        excerpt: Where the words that were looked for are, or nothing.
    """

    conversation_id: str
    title: str
    num_messages: int
    updated_s: float
    excerpt: str = ""


def default_path() -> Path:
    """``$XDG_DATA_HOME/pagedmlx/chat.db`` or ``~/.local/share/pagedmlx/chat.db``."""
    base = os.environ.get("XDG_DATA_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.local/share"))
    return root / "pagedmlx" / "chat.db"


class Store:
    """The file of conversations.

    Args:
        path: Made when it isn't there; None keeps everything in memory only.

    Raises:
        StoreError: It can't be opened, or a newer version has written it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        with _errors(f"{path} can't be opened"):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                # Conversations are nobody else's business; SQLite's other files take its mode.
                path.touch(0o600)
                path.chmod(0o600)
            self._db = sqlite3.connect(path or ":memory:", timeout=_BUSY_S, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise StoreError(
                f"{self.path} was written by a newer pagedmlx (form {version}, not {_VERSION})",
                hint="update pagedmlx, or move the file away",
            )
        self._db.executescript(_SCHEMA)
        self._db.execute(f"PRAGMA user_version = {_VERSION}")

    def save(self, conversation: Conversation, now_s: float) -> None:
        """Write what has changed, all of it or nothing.

        Raises:
            StoreError: It can't be written, such as on a full disk; the changes stay noted.
        """
        name = conversation.conversation_id
        marks = ", ".join("?" * (1 + len(fields(Message))))
        with _errors("the conversation can't be saved"), self._transaction():
            is_there = self._db.execute("SELECT 1 FROM conversations WHERE id = ?", (name,))
            # Another window may have deleted what goes on here.
            written = sorted(conversation.changed if is_there.fetchone() else conversation.messages)
            rows = [(name, *_values(conversation.messages[each])) for each in written]
            self._db.execute(
                "INSERT OR REPLACE INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    name,
                    conversation.shown_title,
                    conversation.system,
                    json.dumps(asdict(conversation.params)),
                    json.dumps(conversation.chosen),
                    conversation.created_s,
                    now_s,
                ),
            )
            self._db.executemany(f"INSERT OR REPLACE INTO messages VALUES ({marks})", rows)
        conversation.changed.difference_update(written)

    def load(self, conversation_id: str) -> Conversation:
        """Read a conversation.

        Raises:
            StoreError: It isn't there or can't be read.
        """
        with _errors("the conversation can't be read"):
            found = self._db.execute(
                "SELECT title, system, params, chosen, created_s FROM conversations WHERE id = ?",
                (conversation_id,),
            ).fetchone()
            if found is None:
                raise StoreError(f"there is no conversation {conversation_id!r}")
            names = ", ".join(each.name for each in fields(Message))
            rows = self._db.execute(
                f"SELECT {names} FROM messages WHERE conversation_id = ? ORDER BY message_id",
                (conversation_id,),
            ).fetchall()
        title, system, params, chosen, created_s = found
        return restored(
            (Message(*row) for row in rows),
            {int(parent): child for parent, child in json.loads(chosen).items()},
            conversation_id=conversation_id,
            title=title,
            system=system,
            params=_params(params),
            created_s=created_s,
        )

    def search(self, words: str = "", limit: int = 200) -> list[Saved]:
        """Conversations, newest first, that have all the words in their title or messages.

        Raises:
            StoreError: The file can't be read.
        """
        tests, values = "", []
        for word in words.split():
            tests += (
                " AND (title LIKE ? ESCAPE '\\' OR EXISTS (SELECT 1 FROM messages m WHERE"
                " m.conversation_id = c.id AND m.text LIKE ? ESCAPE '\\'))"
            )
            values += [_like(word)] * 2
        with _errors("the conversations can't be read"):
            rows = self._db.execute(
                "SELECT id, title, updated_s, (SELECT COUNT(*) FROM messages m WHERE"
                f" m.conversation_id = c.id) FROM conversations c WHERE TRUE{tests}"
                " ORDER BY updated_s DESC LIMIT ?",
                (*values, limit),
            ).fetchall()
            return [
                Saved(name, title, count, updated_s, self._excerpt(name, words))
                for name, title, updated_s, count in rows
            ]

    def delete(self, conversation_id: str) -> None:
        """Forget a conversation; one that isn't there is no error.

        Raises:
            StoreError: The file can't be written.
        """
        with _errors("the conversation can't be deleted"), self._transaction():
            for table, column in (("messages", "conversation_id"), ("conversations", "id")):
                self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (conversation_id,))

    def setting(self, name: str) -> str:
        """What was kept under a name, or nothing.

        Raises:
            StoreError: The file can't be read.
        """
        with _errors("the settings can't be read"):
            row = self._db.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
        return row[0] if row is not None else ""

    def keep_setting(self, name: str, value: str) -> None:
        """Keep a value for the next time.

        Raises:
            StoreError: The file can't be written.
        """
        with _errors("the setting can't be kept"), self._transaction():
            self._db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, value))

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def _excerpt(self, conversation_id: str, words: str) -> str:
        first = next(iter(words.split()), None)
        if first is None:
            return ""
        row = self._db.execute(
            "SELECT text FROM messages WHERE conversation_id = ? AND text LIKE ? ESCAPE '\\'",
            (conversation_id, _like(first)),
        ).fetchone()
        if row is None:
            return ""
        text = " ".join(row[0].split())
        start = max(0, text.lower().find(first.lower()) - 20)
        return f"{'…' if start else ''}{text[start : start + 60]}"

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def export(conversation: Conversation, path: Path) -> None:
    """Write a conversation to a file, as JSON if it is called ``.json``, else as Markdown.

    Raises:
        StoreError: It can't be written; what was there stays.
    """
    as_json = path.suffix.lower() == ".json"
    text = to_json(conversation) if as_json else to_markdown(conversation)
    with _errors(f"{path} can't be written"):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with closing(os.fdopen(handle, "w", encoding="utf-8")) as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def to_markdown(conversation: Conversation) -> str:
    """What is shown of a conversation, as Markdown."""
    parts = [f"# {conversation.shown_title}"]
    if conversation.system:
        parts.append("*System:* " + conversation.system)
    for message in conversation.path():
        parts.append(f"## {message.role.capitalize()}\n\n{message.text}")
        if message.error:
            parts.append(f"*{message.error}*")
    return "\n\n".join(parts) + "\n"


def to_json(conversation: Conversation) -> str:
    """A conversation as JSON: what is shown in OpenAI's form, and beside it the whole tree."""
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    shown = [{"role": each.role, "content": each.text} for each in conversation.path()]
    value = {
        "id": conversation.conversation_id,
        "title": conversation.shown_title,
        "created_s": conversation.created_s,
        "sampling": asdict(conversation.params),
        "messages": system + shown,
        "tree": [asdict(message) for message in conversation.messages.values()],
    }
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def _values(message: Message) -> list[Any]:
    return [getattr(message, each.name) for each in fields(Message)]


def _params(text: str) -> SamplingParams:
    known = {each.name for each in fields(SamplingParams)}
    try:
        return SamplingParams(**{k: v for k, v in json.loads(text).items() if k in known})
    except (ValueError, TypeError, AttributeError, InvalidRequestError):
        return SamplingParams()


def _like(word: str) -> str:
    for special in "\\%_":
        word = word.replace(special, f"\\{special}")
    return f"%{word}%"


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, UnicodeEncodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StoreError(
            f"{what}: {reason}", hint="is the disk full, or the folder not yours to write?"
        ) from error
