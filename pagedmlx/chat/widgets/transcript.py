"""Transcript: the shown messages of a conversation, which stays where the reader scrolled to."""

from __future__ import annotations

from collections.abc import Container, Sequence
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

_CANDIDATE_WIDTH = 22
"""As in the style sheet."""

_MIN_BESIDE, _MAX_BESIDE = 3, 6
"""Where three are too wide they scroll sideways; each of them takes a while to make and draw."""


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

    async def sync(
        self, candidates: Sequence[int] = (), *, speaker: str, at: int | None = None
    ) -> None:
        """Show the path as it is now; what is on the screen already stays.

        Args:
            candidates: Answers that stand side by side at the end, as many as can be read there.
            speaker: What to call the model; empty while there is none.
            at: A candidate that is to be among them.
        """
        wanted: list[tuple[int, ...]] = [(each.message_id,) for each in self.conversation.path()]
        if candidates:
            wanted[-1] = self._beside(candidates, at)
        kept = 0
        while kept < min(len(wanted), len(self._groups)) and (
            self._groups[kept].ids == wanted[kept]
        ):
            kept += 1
        for group in self._groups[kept:]:
            await group.widget.remove()
        del self._groups[kept:]
        for ids in wanted[kept:]:
            widget = self._widget(ids, speaker, candidates)
            self._groups.append(_Group(ids, widget))
        await self.mount_all([group.widget for group in self._groups[kept:]])
        self.query_one(".welcome").visible = not self._groups
        self.refresh_messages(self.conversation.messages, speaker)

    def refresh_messages(self, ids: Container[int], speaker: str = "") -> None:
        """Show what these messages say by now, if they are on the screen."""
        for view in self.views():
            if view.message_id in ids and view.is_mounted:
                view.speaker = view.speaker or speaker
                versions = self.conversation.versions(view.message_id)
                place = (versions.index(view.message_id) + 1, len(versions))
                view.show(self.conversation.messages[view.message_id], place)

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

    def _beside(self, candidates: Sequence[int], at: int | None) -> tuple[int, ...]:
        width = self.size.width or self.app.size.width
        fit = min(max(width // _CANDIDATE_WIDTH, _MIN_BESIDE), _MAX_BESIDE)
        last = self._groups[-1].ids if self._groups else ()
        first = candidates.index(last[0]) if last and last[0] in candidates else 0
        place = first if at is None else candidates.index(at)
        if place < first:
            first = max(0, place - fit + 1)
        elif place >= first + fit:
            first = min(place, len(candidates) - fit)
        return tuple(candidates[first : first + fit])

    def _widget(self, ids: tuple[int, ...], speaker: str, candidates: Sequence[int]) -> Widget:
        messages = [self.conversation.messages[each] for each in ids]
        if ids[0] not in candidates:
            return MessageView(messages[0], speaker)
        hidden = len(candidates) if len(candidates) > len(ids) else 0
        views = [
            MessageView(each, speaker, candidates.index(each.message_id) + 1, hidden)
            for each in messages
        ]
        for view in views:
            view.styles.width = f"{100 / len(views):.2f}%"
        return Horizontal(*views, classes="candidates")
