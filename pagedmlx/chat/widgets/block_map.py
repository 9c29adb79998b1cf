"""BlockMap: every block of the pool as a cell, told apart by colour and by letter."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.content import Content
from textual.geometry import Region
from textual.message import Message as Event
from textual.strip import Strip
from textual.widget import Widget

from pagedmlx.chat.blocks import CACHED, COPIED, FREE, NO_SLOT, SHARED, USED, BlockHistory, Cells

_LIGHT = (
    "#5aa9ff", "#ffa94d", "#51cf66", "#da77f2", "#ffe066", "#ff8787", "#66d9e8", "#c0eb75",
)  # fmt: skip
_DARK = (
    "#1864ab", "#c2570c", "#2b8a3e", "#862e9c", "#8a6d00", "#c92a2a", "#0b7285", "#5c940d",
)  # fmt: skip
"""Colours of conversations: light ones for dark themes, and the other way round."""

_OTHERS = ("#adb5bd", "#6c757d")
_INK = ("#10131a", "#ffffff")
_WIDEST = 4
"""Columns of a cell with the gap beside it, where there is room."""

_SELECTED = -1
_COPIED = ("#ff2d78", "#d6005a")
_GAP = Segment(" ")


def letter(slot: int) -> str:
    """What a conversation is called on the map."""
    return chr(ord("A") + slot) if 0 <= slot < 26 else "?"


def colour(slot: int, is_dark: bool) -> str:
    """A conversation's colour in a dark or a light theme."""
    colours = _LIGHT if is_dark else _DARK
    return _OTHERS[not is_dark] if slot == NO_SLOT else colours[slot % len(colours)]


def glyph(cells: Cells, index: int) -> str:
    """The one character that tells a cell's state without colour."""
    kind = int(cells.kinds[index])
    if kind == FREE:
        return "·"
    if kind == CACHED:
        return "░"
    if kind == COPIED:
        return "*"
    if kind == SHARED:
        count = int(cells.counts[index])
        return str(count) if count < 10 else "+"
    owner = letter(int(cells.slots[index]))
    return owner if cells.fills[index] >= 0.5 else owner.lower()


@lru_cache(maxsize=512)
def _style(kind: int, slot: int, is_dark: bool, paper: Color) -> Style:
    own, ink, front = colour(slot, is_dark), _INK[not is_dark], Color.parse(_INK[is_dark])
    if kind == _SELECTED:
        return Style(color=ink, bgcolor=front.hex, bold=True)
    if kind == CACHED:
        return Style(color=own, bgcolor=paper.blend(front, 0.06).hex)
    if kind == USED:
        return Style(color=ink, bgcolor=own)
    if kind == SHARED:
        # It belongs to nobody alone.
        return Style(color=front.hex, bgcolor=paper.blend(front, 0.35).hex, bold=True)
    if kind == COPIED:
        return Style(color="#ffffff", bgcolor=_COPIED[not is_dark], bold=True)
    return Style(color=_OTHERS[not is_dark], bgcolor=paper.blend(front, 0.06).hex, dim=True)


class BlockMap(Widget, can_focus=True):
    """The pool. Arrows or the mouse select a cell."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1, 0)", "Select", show=False),
        Binding("right", "move(1, 0)", "Select", show=False),
        Binding("up", "move(0, -1)", "Select", show=False),
        Binding("down", "move(0, 1)", "Select", show=False),
        Binding("g", "next_group", "Next pool", show=False),
    ]

    class Selected(Event):
        """Another cell, or none, is selected."""

    def __init__(self) -> None:
        super().__init__()
        self.group = 0
        self.selected: int | None = None
        self._history: BlockHistory | None = None
        self._cells: Cells | None = None
        self._rows: list[Strip] = []
        self._looks = np.zeros(0, np.int64)
        self._layout = (0, 0, 0)
        self._theme = (True, Color(0, 0, 0))
        self._cell_width = 1
        self._step = 1

    @property
    def selected_blocks(self) -> range | None:
        """Ids of the blocks in the selected cell."""
        if self.selected is None or self._cells is None or self._history is None:
            return None
        size = self._cells.num_blocks
        start = self.selected * self._cells.per_cell
        return range(start, min(start + self._cells.per_cell, size))

    @property
    def per_cell(self) -> int:
        """Blocks in one cell."""
        return self._cells.per_cell if self._cells is not None else 1

    @property
    def num_hidden(self) -> int:
        """Blocks that have no cell, since they were never used."""
        if self._history is None or self._history.snapshot is None or self._cells is None:
            return 0
        return self._history.snapshot.pools[self.group].owners.size - self._cells.num_blocks

    def show(self, history: BlockHistory) -> bool:
        """Show what the history says by now, and tell whether any cell looks different.

        Only rows that differ are made and drawn.
        """
        self._history = history
        width, height = self.size
        if history.snapshot is None or not width or not height:
            return False
        self.group = min(self.group, len(history.snapshot.pools) - 1)
        room = (width // _WIDEST) * ((height + 1) // 2)
        size = history.num_shown(self.group, room)
        self._cell_width, self._step = _fitting(width, height, size)
        layout = (width, height, self._cell_width)
        per_row = width // self._cell_width
        cells = self._cells = history.cells(per_row * height, self.group, room)
        if self.selected is not None and self.selected >= cells.kinds.size:
            self.selected = None
        looks = _looks(cells)
        if self.selected is not None:
            looks[self.selected] = _SELECTED
        num_rows = -(-looks.size // per_row)
        if layout != self._layout or looks.size != self._looks.size:
            self._layout = layout
            self._rows = [Strip.blank(0)] * num_rows
            changed = range(num_rows)
            self.refresh()
        else:
            changed = np.unique(np.flatnonzero(looks != self._looks) // per_row).tolist()
        self._looks = looks
        for y in changed:
            self._rows[y] = self._row(y * per_row, per_row)
            self.refresh(Region(0, y * self._step, width, 1))
        return bool(changed)

    def render_line(self, y: int) -> Strip:
        """A row of cells, or the gap below one."""
        if y % self._step == 0 and y // self._step < len(self._rows):
            row = self._rows[y // self._step].adjust_cell_length(self.size.width)
            return row.apply_style(self.rich_style)
        return Strip.blank(self.size.width, self.rich_style)

    def notify_style_update(self) -> None:
        """Take another theme's colours."""
        super().notify_style_update()
        if self.is_attached and self.parent is not None:
            theme = (self.app.current_theme.dark, self.background_colors[0])
            if theme != self._theme:
                self._theme, self._layout = theme, (0, 0, 0)
                if self._history is not None:
                    self.show(self._history)

    def on_resize(self, _event: events.Resize) -> None:
        """Lay out anew."""
        if self._history is not None:
            self.show(self._history)

    def on_click(self, event: events.Click) -> None:
        """Select the cell under the mouse."""
        per_row = max(1, self.size.width // self._cell_width)
        place = event.x // self._cell_width
        if place < per_row:
            self._select(event.y // self._step * per_row + place)

    def action_move(self, dx: int, dy: int) -> None:
        """Select a neighbour of the selected cell."""
        per_row = max(1, self.size.width // self._cell_width)
        self._select(0 if self.selected is None else self.selected + dx + dy * per_row)

    def action_next_group(self) -> None:
        """Show the blocks of the next KV group."""
        if self._history is not None and self._history.snapshot is not None:
            self.group = (self.group + 1) % len(self._history.snapshot.pools)
            self.show(self._history)
            self.post_message(self.Selected())

    def on_blur(self) -> None:
        """Nothing is selected when the map is left."""
        self.selected = None
        self._redraw()

    def _select(self, index: int) -> None:
        if self._cells is not None and 0 <= index < self._cells.kinds.size:
            self.selected = index
            self._redraw()

    def _redraw(self) -> None:
        if self._history is not None:
            self.show(self._history)
        self.post_message(self.Selected())

    def _row(self, start: int, per_row: int) -> Strip:
        cells = self._cells
        assert cells is not None
        segments: list[Segment] = []
        for index in range(start, min(start + per_row, cells.kinds.size)):
            kind, slot = int(cells.kinds[index]), int(cells.slots[index])
            text, width = glyph(cells, index), self._cell_width - 1
            if index == self.selected:
                kind, text = _SELECTED, f"[{text}]" if width >= 3 else text
            segments.append(Segment(text.center(max(1, width)), _style(kind, slot, *self._theme)))
            if self._cell_width > 1:
                segments.append(_GAP)
        return Strip(segments).simplify()


def _fitting(width: int, height: int, num_blocks: int) -> tuple[int, int]:
    """How wide a cell is with the gap beside it, and how high with the gap below it."""
    for cell_width in range(_WIDEST, 1, -1):
        num_rows = -(-num_blocks // max(1, width // cell_width))
        if 2 * num_rows - 1 <= height:
            return cell_width, 2
        if num_rows <= height:
            return cell_width, 1
    return 1, 1


def _looks(cells: Cells) -> npt.NDArray[np.int64]:
    """One number for each cell that tells everything that is drawn of it."""
    looks = cells.kinds.astype(np.int64)
    looks = looks * 1024 + (cells.slots + 1)
    looks = looks * 16 + np.minimum(cells.counts, 10)
    return looks * 2 + (cells.fills >= 0.5)


def legend(per_cell: int, num_hidden: int, width: int) -> Content:
    """What the cells' characters mean; in one line if there is room for it.

    Args:
        per_cell: Blocks in one cell.
        num_hidden: Blocks that have no cell, since they were never used.
        width: Of a line.
    """
    meanings = {"A": "in use", "2": "shared", "*": "copied", "░": "cached", "·": "free"}
    parts = [Content.assemble((sign, "bold $text"), f" {text}") for sign, text in meanings.items()]
    told = Content("  ").join(parts)
    if told.cell_length > width:
        told = Content(" ").join(parts)
    more: list[str] = []
    if per_cell > 1:
        more += [f"1 cell = {per_cell} blocks", "small letter: under half in use"]
    if num_hidden:
        more.append(f"{num_hidden:,} more were never used")
    for place, note in enumerate(more):
        is_short = not place and told.cell_length + 2 + len(note) <= width
        told += Content(f"  {note}" if is_short else f"; {note}" if place else f"\n{note}")
    return told
