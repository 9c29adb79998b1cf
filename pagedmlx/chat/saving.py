"""Saving: keeps conversations and the theme; what can't be kept is noted, told and tried again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pagedmlx.chat.session import Conversation
from pagedmlx.chat.store import Store, StoreError


class Saving:
    """A store that never raises when it writes.

    Args:
        path: Where conversations are kept; None keeps them in memory only.
        complain: Told in a sentence what is wrong.
    """

    def __init__(self, path: Path | None, complain: Callable[[str], None]) -> None:
        self._complain = complain
        self._reason = ""
        self._unsaved: dict[int, Conversation] = {}
        try:
            self.store = Store(path)
        except StoreError as error:
            # The chat is of use without it; nothing that was saved is touched.
            complain(f"{error}; conversations of this session will not be kept")
            self._reason = str(error)
            self.store = Store(None)
        self._is_kept = not self._reason

    @property
    def problem(self) -> str:
        """What isn't saved and why, or nothing."""
        num = len(self._unsaved)
        what = "one conversation is" if num == 1 else f"{num} conversations are"
        return f"{what} not saved: {self._reason}" if num else ""

    def is_unsaved(self, conversation: Conversation) -> bool:
        """Whether a conversation could not be kept."""
        return id(conversation) in self._unsaved

    def save_all(self, conversations: Iterable[Conversation]) -> None:
        """Keep those that have changed, and try again what could not be kept."""
        changed = {id(each): each for each in conversations if each.changed}
        for each in (self._unsaved | changed).values():
            self.save(each)

    def save(self, conversation: Conversation) -> None:
        """Keep a conversation, if there is anything in it."""
        self._unsaved.pop(id(conversation), None)
        if not conversation.messages:
            return
        try:
            self.store.save(conversation, time.time())
        except StoreError as error:
            if self._reason != str(error):
                self._complain(f"{error}. It stays on the screen, and is tried again.")
                self._reason = str(error)
            self._unsaved[id(conversation)] = conversation
        else:
            if not self._is_kept:
                self._unsaved[id(conversation)] = conversation
            elif not self._unsaved:
                self._reason = ""

    @property
    def theme(self) -> str:
        """The theme of the last time, or nothing."""
        with contextlib.suppress(StoreError):
            return self.store.setting("theme")
        return ""

    def keep_theme(self, name: str) -> None:
        """Keep a theme for the next time; not worth a word if it can't be."""
        with contextlib.suppress(StoreError):
            self.store.keep_setting("theme", name)
