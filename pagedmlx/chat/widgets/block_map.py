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
from textual.content import Content
from textual.geometry import Region
from textual.message import Message as Event
from textual.strip import Strip
from textual.widget import Widget

from pagedmlx.chat.blocks import CACHED, COPIED, FREE, NO_SLOT, SHARED, USED, BlockHistory, Cells

COLOURS = (
    "#5aa9ff", "#ffa94d", "#51cf66", "#da77f2", "#ffe066", "#ff8787", "#66d9e8", "#c0eb75",
)  # fmt: skip
_OTHERS = "#adb5bd"
_INK = "#10131a"
_GAP = Segment(" ")


def letter(slot: int) -> str:
    """What a conversation is called on the map."""
    return chr(ord("A") + slot) if 0 <= slot < 26 else "?"


def colour(slot: int) -> str:
    """A conversation's colour."""
    return _OTHERS if slot == NO_SLOT else COLOURS[slot % len(COLOURS)]


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
def _style(kind: int, slot: int, is_selected: bool) -> Style:
    own = colour(slot)
    if is_selected:
        return Style(color="#000000", bgcolor="#ffffff", bold=True)
    if kind == CACHED:
        return Style(color=own, dim=True)
    if kind == USED:
        return Style(color=_INK, bgcolor=own)
    if kind == SHARED:
        return Style(color=_INK, bgcolor=own, bold=True, underline=True)
    if kind == COPIED:
        return Style(color=_INK, bgcolor="#ffffff", bold=True)
    return Style(color=_OTHERS, dim=True)


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
        self._cell_width = 1
        self._step = 1

    @property
    def selected_blocks(self) -> range | None:
        """Ids of the blocks in the selected cell."""
        if self.selected is None or self._cells is None or self._history is None:
            return None
        assert self._history.snapshot is not None
        size = self._history.snapshot.pools[self.group].owners.size
        start = self.selected * self._cells.per_cell
        return range(start, min(start + self._cells.per_cell, size))

    @property
    def per_cell(self) -> int:
        """Blocks in one cell."""
        return self._cells.per_cell if self._cells is not None else 1

    def show(self, history: BlockHistory) -> bool:
        """Show what the history says by now, and tell whether any cell looks different.

        Only rows that differ are made and drawn.
        """
        self._history = history
        width, height = self.size
        if history.snapshot is None or not width or not height:
            return False
        self.group = min(self.group, len(history.snapshot.pools) - 1)
        size = history.snapshot.pools[self.group].owners.size
        self._cell_width, self._step = _fitting(width, height, size)
        layout = (width, height, self._cell_width)
        per_row = width // self._cell_width
        cells = self._cells = history.cells(per_row * height, self.group)
        if self.selected is not None and self.selected >= cells.kinds.size:
            self.selected = None
        looks = _looks(cells)
        if self.selected is not None:
            looks[self.selected] = -1
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
            text = glyph(cells, index).center(max(1, self._cell_width - 1))
            segments.append(Segment(text, _style(kind, slot, index == self.selected)))
            if self._cell_width > 1:
                segments.append(_GAP)
        return Strip(segments).simplify()


def _fitting(width: int, height: int, num_blocks: int) -> tuple[int, int]:
    """How wide a cell is with the gap beside it, and how high with the gap below it."""
    for cell_width in (6, 5, 4, 3, 2):
        num_rows = -(-num_blocks // max(1, width // cell_width))
        if 2 * num_rows - 1 <= height:
            return cell_width, 2
        if num_rows <= height and cell_width < 4:
            return cell_width, 1
    return 1, 1


def _looks(cells: Cells) -> npt.NDArray[np.int64]:
    """One number for each cell that tells everything that is drawn of it."""
    looks = cells.kinds.astype(np.int64)
    looks = looks * 1024 + (cells.slots + 1)
    looks = looks * 16 + np.minimum(cells.counts, 10)
    return looks * 2 + (cells.fills >= 0.5)


def legend(per_cell: int, width: int) -> Content:
    """What the cells' characters mean; in one line if there is room for it."""
    meanings = {"A": "in use", "2": "shared", "*": "copied", "░": "cached", "·": "free"}
    parts = [Content.assemble((sign, "bold $text"), f" {text}") for sign, text in meanings.items()]
    told = Content("  ").join(parts)
    if told.cell_length > width:
        told = Content(" ").join(parts)
    if per_cell > 1:
        more = f"1 cell = {per_cell} blocks"
        is_short = told.cell_length + 2 + len(more) <= width
        told += Content(f"  {more}" if is_short else f"\n{more}; small letter: under half in use")
    return told
