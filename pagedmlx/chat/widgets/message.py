"""MessageView: one message, with its reasoning folded and what can be done with it."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message as Event
from textual.reactive import Reactive
from textual.strip import Strip
from textual.widgets import Collapsible, Static

from pagedmlx.chat.reasoning import Parts, split_reasoning
from pagedmlx.chat.session import ASSISTANT, FAILED, LENGTH, STOPPED, STREAMING, USER, Message
from pagedmlx.chat.widgets.line import Line
from pagedmlx.chat.widgets.markdown import GrowingMarkdown
from pagedmlx.text.visible import visible

_STATUS = {
    STREAMING: "writing…",
    LENGTH: "reached the longest length",
    STOPPED: "stopped",
    FAILED: "failed",
}


class MessageView(Vertical, can_focus=True):
    """One message.

    Args:
        message: What to show.
        speaker: The model that says it; empty while none is loaded.
        candidate: Its number among candidates that stand side by side, else 0.
        num_candidates: How many there are, if not all of them are on the screen.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "wish('previous')", "Message above", show=False),
        Binding("down,j", "wish('next')", "Message below", show=False),
        Binding("e", "wish('edit')", "Edit"),
        Binding("r", "wish('retry')", "Retry"),
        Binding("b", "wish('branch')", "Branch"),
        Binding("c", "wish('copy')", "Copy"),
        Binding("y", "wish('copy_code')", "Copy code"),
        Binding("left", "wish('older')", "Older version", show=False),
        Binding("right", "wish('newer')", "Newer version", show=False),
        Binding("enter", "wish('pick')", "Pick"),
        Binding("space", "fold", "Reasoning", show=False),
    ]

    virtual_size = Reactive(Size(0, 0), repaint=False)
    """As in ``GrowingMarkdown``."""

    class Wished(Event):
        """The user wants something done with a message."""

        def __init__(self, view: MessageView, wish: str) -> None:
            super().__init__()
            self.view, self.wish = view, wish

    def __init__(
        self, message: Message, speaker: str, candidate: int = 0, num_candidates: int = 0
    ) -> None:
        super().__init__(classes=f"-{message.role}")
        self.message = message
        self.speaker = speaker
        self._candidate, self._num_candidates = candidate, num_candidates
        self._versions = (1, 1)
        self._thoughts: Line | None = None
        self.set_class(candidate > 0, "-candidate")

    @property
    def message_id(self) -> int:
        """The message's id."""
        return self.message.message_id

    def compose(self) -> ComposeResult:
        """Build the parts."""
        yield Line(classes="header")
        if self.message.role == ASSISTANT:
            yield GrowingMarkdown()
        else:
            yield Static(Content(visible(self.message.text)), classes="said")

    def on_mount(self) -> None:
        """Fill the parts."""
        self.show(self.message, self._versions)

    def show(self, message: Message, versions: tuple[int, int]) -> None:
        """Show what the message says by now.

        Args:
            message: The same message, grown.
            versions: Which version it is, from 1, and how many there are.
        """
        self.message, self._versions = message, versions
        self.query_one(".header", Line).say(self._header())
        self.set_class(message.status == STREAMING, "-streaming")
        # A widget costs something even where it isn't seen: these two are made when needed.
        if message.error:
            if not self.query(".error"):
                self.mount(Line(wraps=True, classes="error"))
            self.query_one(".error", Line).say(Content(visible(message.error)))
        if message.role == ASSISTANT:
            parts = split_reasoning(message.text)
            if parts.reasoning:
                self._show_reasoning(parts)
            is_done = message.status != STREAMING
            self.query_one(GrowingMarkdown).show(parts.answer, is_done=is_done)

    def render_lines(self, crop: Region) -> list[Strip]:
        """What is behind the parts: a bar at the left, the same in every row."""
        if self._candidate or not crop.height:
            return super().render_lines(crop)
        return super().render_lines(Region(crop.x, crop.y, crop.width, 1)) * crop.height

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only candidates can be picked."""
        return self._candidate > 0 or (action, parameters) != ("wish", ("pick",))

    def action_wish(self, wish: str) -> None:
        """Pass a wish on to who can fulfil it."""
        self.post_message(self.Wished(self, wish))

    def action_fold(self) -> None:
        """Open or fold the reasoning."""
        for folded in self.query(Collapsible):
            folded.collapsed = not folded.collapsed

    def _show_reasoning(self, parts: Parts) -> None:
        if self._thoughts is None:
            self._thoughts = Line(wraps=True, classes="thoughts")
            self.mount(Collapsible(self._thoughts, classes="reasoning"), before="GrowingMarkdown")
        self.query_one(Collapsible).title = "reasoning…" if parts.is_thinking else "reasoning"
        self._thoughts.say(Content(visible(parts.reasoning)))

    def _header(self) -> Content:
        name = "you" if self.message.role == USER else self.speaker or "assistant"
        if self._candidate:
            of = f"/{self._num_candidates}" if self._num_candidates else ""
            name = f"[{self._candidate}{of}]"
        notes: list[str] = []
        place, count = self._versions
        if count > 1 and not self._candidate:
            notes.append(f"← {place}/{count} →")
        if self.message.status == STREAMING and not self.speaker:
            notes.append("waiting for a model")
        elif self.message.status in _STATUS:
            notes.append(_STATUS[self.message.status])
        # While it grows the status line counts, and needn't be drawn at every word.
        if self.message.num_tokens and self.message.status != STREAMING:
            count = self.message.num_tokens
            notes.append(f"{count} token{'s' if count > 1 else ''}")
        return Content.assemble((visible(name), "bold"), ("  " + " · ".join(notes), "dim"))
