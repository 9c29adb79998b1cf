"""HelpScreen: all keys and commands."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from pagedmlx.chat.commands import COMMANDS

_KEYS = {
    "While you write": (
        ("Enter", "send"),
        ("Ctrl+J, Alt+Enter", "new line; pasted text keeps its lines"),
        ("↑ ↓", "what you sent before"),
        ("PgUp PgDn", "scroll; the view stays where you scroll to"),
        ("Ctrl+↑", "go to the messages"),
        ("Escape, Ctrl+C", "stop the answer"),
    ),
    "On a message": (
        ("↑ ↓", "other messages; past the last one back to the prompt"),
        ("← →", "other versions of it, or other candidates"),
        ("Enter", "pick this candidate"),
        ("e r b", "edit and send again, answer again, branch into a new tab"),
        ("c y", "copy the text, copy its code block (or double-click the code)"),
        ("Space", "open or fold the reasoning"),
    ),
    "Anywhere": (
        ("Ctrl+T, F8", "new tab, close tab"),
        ("F6 or Ctrl+PgDn, Shift+F6 or Ctrl+PgUp", "next tab, previous tab"),
        ("F2", "show or hide the memory"),
        ("F3", "go to the block map: arrows select a block, g shows the next pool"),
        ("F4, F5", "settings, saved conversations"),
        ("Ctrl+P", "command palette: themes and more"),
        ("Ctrl+Q", "quit"),
    ),
}


class HelpScreen(ModalScreen[None]):
    """A page of keys and commands."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q,f1", "dismiss", "Close"),
    ]

    def compose(self) -> ComposeResult:
        """Build the page."""
        with VerticalScroll(classes="sheet"):
            yield Static(self._page())

    def _page(self) -> Table:
        page = Table.grid(padding=(0, 2))
        page.add_column(width=24)
        page.add_column()
        for title, keys in _KEYS.items():
            page.add_row(Text(title, "bold underline"))
            for key, text in keys:
                page.add_row(Text(key, "bold"), Text(text))
            page.add_row()
        page.add_row(Text("Commands", "bold underline"))
        for each in COMMANDS:
            page.add_row(Text(f"/{each.name} {each.usage}", "bold"), Text(each.help))
        return page
