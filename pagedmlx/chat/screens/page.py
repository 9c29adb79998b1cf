"""PageScreen: a page to read, in sections of two columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static


class PageScreen(ModalScreen[None]):
    """A sheet with a page on it.

    Args:
        sections: What stands left and right, in lines under titles.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q,f1", "dismiss", "Close"),
    ]

    def __init__(self, sections: Mapping[str, Iterable[tuple[str, str]]]) -> None:
        super().__init__()
        self._sections = sections

    def compose(self) -> ComposeResult:
        """Build the page."""
        with VerticalScroll(classes="sheet"):
            yield Static(self._page())

    def _page(self) -> Table:
        page = Table.grid(padding=(0, 2))
        page.add_column(width=24)
        page.add_column()
        for place, (title, lines) in enumerate(self._sections.items()):
            if place:
                page.add_row()
            page.add_row(Text(title, "bold underline"))
            for left, right in lines:
                page.add_row(Text(left, "bold"), Text(right))
        return page
