"""PickerScreen: chooses a model of this machine, or names another one."""

from __future__ import annotations

from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from pagedmlx import hub
from pagedmlx.embedded import EMBEDDED_MODEL
from pagedmlx.errors import PagedMLXError, readable_bytes


class PickerScreen(ModalScreen[str | None]):
    """A list of models; the result is a name, or None.

    Args:
        problem: Why the last choice could not be loaded.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Close")]

    def __init__(self, problem: str = "") -> None:
        super().__init__()
        self._problem = problem

    def compose(self) -> ComposeResult:
        """Build the list."""
        with Vertical(classes="sheet"):
            yield Static("Choose a model", classes="heading")
            yield Static(Content(self._problem), classes="problem")
            yield OptionList(markup=False)
            yield Input(placeholder="or write owner/model of Hugging Face, or a path")
            yield Static("Enter chooses · Tab goes to the line below the list", classes="hint")

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one(".problem").display = bool(self._problem)
        self.query_one(OptionList).focus()
        self._look()

    @work(thread=True)
    def _look(self) -> None:
        try:
            found = hub.list_models()
        except (PagedMLXError, OSError):
            found = []
        rows = [
            (each.name, f"{readable_bytes(each.size_bytes):>10}  {each.kind}") for each in found
        ]
        if EMBEDDED_MODEL not in (name for name, _ in rows):
            rows.insert(0, (EMBEDDED_MODEL, "the small default model, fetched first"))
        self.app.call_from_thread(self._show, rows)

    def _show(self, rows: list[tuple[str, str]]) -> None:
        width = max(len(name) for name, _ in rows) + 2
        models = self.query_one(OptionList)
        models.add_options(
            Option(Content.assemble((name.ljust(width), "bold"), (note, "dim")), id=name)
            for name, note in rows
        )
        models.highlighted = 0

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Take this one."""
        self.dismiss(event.option.id)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take what was written."""
        if event.value.strip():
            self.dismiss(event.value.strip())
