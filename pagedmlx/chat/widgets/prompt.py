"""Prompt: where the user writes; several lines, what was sent before, and pasted text whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message as Event
from textual.widgets import TextArea

_NEW_LINE = ("ctrl+j", "shift+enter", "alt+enter")


class Prompt(TextArea):
    """A draft of one message.

    Args:
        history: What was sent before, oldest first; read when it is needed.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+up", "leave('up')", "Messages"),
        Binding("pageup", "leave('page_up')", "Scroll up", show=False),
        Binding("pagedown", "leave('page_down')", "Scroll down", show=False),
    ]

    class Submitted(Event):
        """The draft is to be sent."""

        def __init__(self, prompt: Prompt, text: str) -> None:
            super().__init__()
            self.prompt, self.text = prompt, text

    class Left(Event):
        """The user wants to move in the transcript: ``up``, ``page_up`` or ``page_down``."""

        def __init__(self, where: str) -> None:
            super().__init__()
            self.where = where

    def __init__(self, history: Sequence[str]) -> None:
        super().__init__(
            placeholder="Message, or / for commands",
            compact=True,
            show_line_numbers=False,
            highlight_cursor_line=False,
            tab_behavior="focus",
        )
        # Each blink would cost as much as a line of text.
        self.cursor_blink = False
        self._history = history
        self._place: int | None = None
        self._draft = ""

    def put(self, text: str) -> None:
        """Replace the draft, with the cursor at its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def begin_anew(self) -> None:
        """Begin a new draft."""
        self._place, self._draft = None, ""
        self.text = ""

    def put_back(self, text: str) -> None:
        """Put what was submitted before what has been typed since then."""
        self.put(f"{text}\n{self.text}" if self.text else text)

    def action_leave(self, where: str) -> None:
        """Pass on that the user wants to move in the transcript."""
        self.post_message(self.Left(where))

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            self._take(event)
            self.post_message(self.Submitted(self, self.text))
            # At once: what is typed before somebody reads it is the next message.
            self.begin_anew()
        elif event.key in _NEW_LINE:
            self._take(event)
            self.insert("\n")
        elif event.key == "up" and self.cursor_location[0] == 0 and not self._has_wrapped_above():
            if self._browse(-1):
                self._take(event)
        elif (
            event.key == "down"
            and self._place is not None
            and self.cursor_location[0] == self.document.line_count - 1
            and self._browse(1)
        ):
            self._take(event)

    def _take(self, event: events.Key) -> None:
        event.prevent_default()
        event.stop()

    def _has_wrapped_above(self) -> bool:
        return self.wrapped_document.location_to_offset(self.cursor_location).y > 0

    def _browse(self, by: int) -> bool:
        place = len(self._history) if self._place is None else self._place
        if self._place is None:
            self._draft = self.text
        place += by
        if place < 0:
            return False
        if place >= len(self._history):
            self._place = None
            self.put(self._draft)
            return True
        self._place = place
        self.put(self._history[place])
        return True
