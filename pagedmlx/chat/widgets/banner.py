"""Banner: one line above everything, while there is something to say of the model."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from pagedmlx.chat.widgets.gauges import bar


class Banner(Static):
    """A line that is there only while it says something."""

    def on_mount(self) -> None:
        """Begin with nothing to say."""
        self.say("")

    def say(self, text: str) -> None:
        """Say something, or nothing."""
        self.update(Content(text))
        self.display = bool(text)

    def say_stage(self, what: str, share: float | None) -> None:
        """Say what is being done, and how much of it is done if that is known."""
        self.say(what if share is None else f"{what}  {bar(share, 20)} {share:.0%}")
