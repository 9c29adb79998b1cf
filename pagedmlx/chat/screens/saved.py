"""SavedScreen: finds a saved conversation by words in its title or messages."""

from __future__ import annotations

import time
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from pagedmlx.chat.store import Saved, Store
from pagedmlx.errors import PagedMLXError
from pagedmlx.text.visible import visible


class SavedScreen(ModalScreen[str | None]):
    """A list to choose from; the result is the conversation's id, or None.

    Args:
        store: Where they are.
        words: What to look for at first.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close"),
        Binding("down", "to_list", "List", show=False),
    ]

    def __init__(self, store: Store, words: str = "") -> None:
        super().__init__()
        self._store, self._words = store, words

    def compose(self) -> ComposeResult:
        """Build the list."""
        with Vertical(classes="sheet"):
            yield Static("Saved conversations", classes="heading")
            yield Input(self._words, placeholder="words in title or messages")
            yield OptionList(markup=False)
            yield Static("Enter opens · Escape closes", classes="hint")

    def on_mount(self) -> None:
        """Show the newest."""
        self._find(self._words)
        self.query_one(Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Look again."""
        self._find(event.value)

    def on_input_submitted(self) -> None:
        """Open the first one."""
        found = self.query_one(OptionList)
        if found.option_count and found.get_option_at_index(0).id:
            self.dismiss(found.get_option_at_index(0).id)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open this one."""
        self.dismiss(event.option.id)

    def action_to_list(self) -> None:
        """Go from the words to the list."""
        found = self.query_one(OptionList)
        found.focus()
        found.highlighted = 0

    def _find(self, words: str) -> None:
        shown = self.query_one(OptionList)
        shown.clear_options()
        try:
            found = self._store.search(words)
        except PagedMLXError as error:
            shown.add_option(Option(Content(str(error)), disabled=True))
            return
        if not found:
            shown.add_option(Option(Content("nothing is found"), disabled=True))
        shown.add_options(Option(_row(each), id=each.conversation_id) for each in found)


def _row(saved: Saved) -> Content:
    when = time.strftime("%d %b %H:%M", time.localtime(saved.updated_s))
    row = Content.assemble(
        (f"{when}  ", "dim"),
        visible(saved.title or "untitled"),
        (f"  {saved.num_messages} messages", "dim"),
    )
    if saved.excerpt:
        row += Content.assemble(("\n               " + visible(saved.excerpt), "italic dim"))
    return row
