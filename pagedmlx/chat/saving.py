"""Saving: keeps conversations and the theme; what can't be kept is told once and tried again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
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
        self._has_failed = False
        try:
            self.store = Store(path)
        except StoreError as error:
            # The chat is of use without it; nothing that was saved is touched.
            complain(f"{error}; conversations of this session will not be kept")
            self.store = Store(None)

    def save(self, conversation: Conversation) -> None:
        """Keep a conversation, if there is anything in it."""
        if not conversation.messages:
            return
        try:
            self.store.save(conversation, time.time())
        except StoreError as error:
            if not self._has_failed:
                self._complain(f"{error}. It stays on the screen, and is tried again.")
            self._has_failed = True
        else:
            self._has_failed = False

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
