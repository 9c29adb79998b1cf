"""Transcript: the shown messages of a conversation, which stays where the reader scrolled to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from pagedmlx.chat.session import Conversation
from pagedmlx.chat.widgets.message import MessageView

_WELCOME = (
    "Ask something. Enter sends, Ctrl+J begins a new line, F1 shows all keys.\n"
    "/new opens a conversation beside this one; both are answered at once."
)


@dataclass(frozen=True, slots=True)
class _Group:
    ids: tuple[int, ...]
    widget: Widget


class Transcript(VerticalScroll, can_focus=False):
    """The path through a conversation; it follows the end unless the user scrolled up.

    Args:
        conversation: What to show.
    """

    def __init__(self, conversation: Conversation) -> None:
        super().__init__()
        self.conversation = conversation
        self._groups: list[_Group] = []

    async def on_mount(self) -> None:
        """Stick to the end."""
        self.anchor()
        await self.mount(Static(Content(_WELCOME), classes="welcome"))

    async def sync(self, candidates: Sequence[int] = (), *, speaker: str) -> None:
        """Show the path as it is now; what is on the screen already stays.

        Args:
            candidates: Answers that stand side by side at the end.
            speaker: What to call the model; empty while there is none.
        """
        wanted: list[tuple[int, ...]] = [(each.message_id,) for each in self.conversation.path()]
        if candidates:
            wanted[-1] = tuple(candidates)
        kept = 0
        while kept < min(len(wanted), len(self._groups)) and (
            self._groups[kept].ids == wanted[kept]
        ):
            kept += 1
        for group in self._groups[kept:]:
            await group.widget.remove()
        del self._groups[kept:]
        for ids in wanted[kept:]:
            widget = self._widget(ids, speaker)
            self._groups.append(_Group(ids, widget))
        await self.mount_all([group.widget for group in self._groups[kept:]])
        self.query_one(".welcome").visible = not self._groups
        for group in self._groups:
            for message_id in group.ids:
                self.refresh_message(message_id, speaker)

    def refresh_message(self, message_id: int, speaker: str = "") -> None:
        """Show what a message says by now, if it is on the screen."""
        view = self.view(message_id)
        if view is not None and view.is_mounted:
            view.speaker = view.speaker or speaker
            versions = self.conversation.versions(message_id)
            place = (versions.index(message_id) + 1, len(versions))
            view.show(self.conversation.messages[message_id], place)

    def view(self, message_id: int) -> MessageView | None:
        """The view of a message that is on the screen."""
        return next((each for each in self.views() if each.message_id == message_id), None)

    def views(self) -> list[MessageView]:
        """All views, first to last."""
        return list(self.query(MessageView))

    def focus_neighbour(self, view: MessageView | None, by: int) -> bool:
        """Move the focus to a view so many places further on; whether there is one."""
        views = self.views()
        place = len(views) + by if view is None else views.index(view) + by
        if not 0 <= place < len(views):
            return False
        views[place].focus()
        return True

    def follow(self) -> None:
        """Go to the end and stay there."""
        self.anchor()

    def _widget(self, ids: tuple[int, ...], speaker: str) -> Widget:
        messages = [self.conversation.messages[each] for each in ids]
        if len(ids) == 1:
            return MessageView(messages[0], speaker)
        views = [MessageView(each, speaker, number) for number, each in enumerate(messages, 1)]
        for view in views:
            view.styles.width = f"{100 / len(views):.2f}%"
        return Horizontal(*views, classes="candidates")
