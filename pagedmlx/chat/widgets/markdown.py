"""GrowingMarkdown: an answer on the screen; only its last piece is drawn anew when it grows."""

from __future__ import annotations

from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message as Event
from textual.reactive import Reactive
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from pagedmlx.chat.pieces import GrowingText
from pagedmlx.chat.widgets.ink import Ink

_ENDLESS = 2**31
_ROOM = 4
"""An answer that grows gets room for so many lines at once: a layout costs more than they do."""

_INKS = ("primary", "secondary", "accent", "success", "warning", "error")
_COLOURS = ("surface", *(f"text-{name}" for name in _INKS))


@lru_cache(maxsize=4)
def _ink(colours: tuple[tuple[str, str], ...]) -> Ink:
    return Ink(dict(colours))


class GrowingMarkdown(Widget):
    """Markdown in lines; a double click on code copies it.

    One widget for all of it: its layout costs the same however long the answer is.
    """

    DEFAULT_CSS = """
    GrowingMarkdown {
        width: 1fr;
        height: auto;
    }
    """

    virtual_size = Reactive(Size(0, 0), repaint=False)
    """It follows from a layout; Textual's own asks for another one, in vain without scrollbars."""

    class CopyWanted(Event):
        """The user wants the code of a block."""

        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code

    def __init__(self) -> None:
        super().__init__()
        self._text = GrowingText()
        self._strips: list[Strip] = []
        self._starts: list[int] = []
        self._num_drawn = 0
        self._width = 0
        self._theme = ""
        self._ink: Ink | None = None
        self._painted: dict[int, Strip] = {}
        self._paper = (Style.null(), 0)
        self._is_done = False

    @property
    def plain(self) -> str:
        """What is on the screen, as text."""
        return "\n".join(strip.text.rstrip() for strip in self._strips)

    def show(self, text: str, *, is_done: bool = True) -> None:
        """Show a text; cheap if it goes on from the one before.

        Args:
            text: All of it.
            is_done: Whether it will not go on.
        """
        kept = self._text.take(text)
        height, num_lines = self._height, len(self._strips)
        if is_done and not self._is_done and self._text.pieces:
            last = len(self._text.pieces) - 1
            kept = last if kept is None else min(kept, last)
        self._is_done = is_done
        if kept is None:
            return
        self._num_drawn = min(self._num_drawn, kept)
        if not self._width or not self.is_attached:
            return
        first = self._starts[kept] if kept < len(self._starts) else num_lines
        before = self._strips[first:]
        self._draw()
        for old, new in zip(before, self._strips[first:], strict=False):
            if old != new:
                break
            first += 1
        end = max(num_lines, len(self._strips), first + 1)
        rest = Region(0, first, self._width, end - first)
        self.refresh(rest, layout=self._height != height)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Lines at this width."""
        if width != self._width:
            self._width, self._num_drawn = width, 0
        self._draw()
        return self._height

    @property
    def _height(self) -> int:
        step = 1 if self._is_done else _ROOM
        return -(-len(self._strips) // step) * step

    def notify_style_update(self) -> None:
        """Take another theme's colours."""
        super().notify_style_update()
        if self._theme and self._theme != self.app.theme:
            self._theme, self._num_drawn = "", 0
            self._draw()
            self.refresh()

    def render_lines(self, crop: Region) -> list[Strip]:
        """The lines in a region; those that have been painted before cost nothing."""
        if not self.is_attached:
            # It was taken away while the screen was being painted.
            return [Strip.blank(crop.width)] * crop.height
        paper = (self.rich_style, self.size.width)
        if paper != self._paper:
            self._paper = paper
            self._painted.clear()
        background, filters = self.background_colors[1], self.get_line_filters()
        strips: list[Strip] = []
        for y in crop.line_range:
            strip = self._painted_line(y)
            for each in filters:
                strip = strip.apply_filter(each, background)
            strips.append(strip.crop(crop.x, crop.right))
        return strips

    def _painted_line(self, y: int) -> Strip:
        selection = self.text_selection
        span = selection.get_span(y) if selection is not None else None
        if span is None and y in self._painted:
            return self._painted[y]
        style, width = self._paper
        strip = self._strips[y] if y < len(self._strips) else Strip.blank(0)
        painted = strip.adjust_cell_length(width).apply_style(style).apply_offsets(0, y)
        if span is not None:
            # In characters; some of them are two cells wide.
            start, end = (cell_len(strip.text[:at]) for at in (span[0], span[1] % _ENDLESS))
            marked = self.screen.get_component_rich_style("screen--selection")
            chosen = Segment.apply_style(painted.crop(start, end), post_style=marked)
            return Strip.join([painted.crop(0, start), Strip(chosen), painted.crop(end)])
        if y < len(self._strips):
            self._painted[y] = painted
        return painted

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The text that is selected."""
        return selection.extract(self.plain), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Draw what is selected."""
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """Ask for a copy of the code under the mouse."""
        if event.chain == 2:
            place = max(
                (at for at, start in enumerate(self._starts) if start <= event.y), default=None
            )
            code = None if place is None else self._text.pieces[place].code
            if code is not None:
                event.stop()
                self.post_message(self.CopyWanted(code))

    def _draw(self) -> None:
        pieces, first = self._text.pieces, self._num_drawn
        if first >= len(pieces) == len(self._starts):
            return
        if first < len(self._starts):
            at = self._starts[first]
            for y in range(at, len(self._strips)):
                self._painted.pop(y, None)
            del self._strips[at:], self._starts[first:]
        ink = self._inked()
        for place in range(first, len(pieces)):
            piece, is_last = pieces[place], place == len(pieces) - 1
            self._starts.append(len(self._strips))
            if piece.has_gap and place:
                self._strips.append(Strip.blank(0))
            is_open = is_last and not self._is_done
            self._strips += ink.draw(piece, self._width, is_open=is_open)
        self._num_drawn = len(pieces)

    def _inked(self) -> Ink:
        if self._ink is None or self._theme != self.app.theme:
            self._theme = self.app.theme
            colours = self.app.theme_variables
            self._ink = _ink(tuple((name, colours[name]) for name in _COLOURS))
        return self._ink
