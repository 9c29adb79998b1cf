"""Line: text that changes often; the screen is laid out anew only when that is needed."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static


class Line(Static):
    """A text of a few lines.

    Args:
        wraps: Whether a change may need more or fewer rows, though it has as many lines.
        classes: For the style sheet.
    """

    def __init__(self, *, wraps: bool = False, classes: str = "") -> None:
        super().__init__(classes=classes)
        self._wraps = wraps
        self._said = Content("")

    def say(self, content: Content) -> None:
        """Show a text; nothing happens if it is shown already."""
        before, self._said = self._said, content
        if not content.is_same(before):
            num_lines = content.plain.count("\n")
            is_same_size = bool(before) and num_lines == before.plain.count("\n")
            self.update(content, layout=self._wraps or not is_same_size)
