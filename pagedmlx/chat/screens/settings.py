"""SettingsScreen: how a conversation's answers are sampled, each setting with its meaning."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label, Static, TextArea

from pagedmlx.chat.commands import SETTINGS, setting_text, with_setting
from pagedmlx.chat.session import Conversation
from pagedmlx.errors import InvalidRequestError


class SettingsScreen(ModalScreen[bool]):
    """A form; a value that can't be is told at once and not taken. The result is True.

    Args:
        conversation: Whose settings they are.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "finish", "Done")]

    def __init__(self, conversation: Conversation) -> None:
        super().__init__()
        self._conversation = conversation

    def compose(self) -> ComposeResult:
        """Build the form."""
        with VerticalScroll(classes="sheet"):
            yield Static("Settings of this conversation", classes="heading")
            yield Label("system message")
            yield TextArea(self._conversation.system, compact=True, classes="system")
            for name, meaning in SETTINGS.items():
                with Horizontal(classes="setting"):
                    yield Label(name)
                    value = setting_text(self._conversation.params, name)
                    yield Input(value, id=name, compact=True)
                    with Vertical():
                        yield Static(Content(meaning), classes="meaning")
            yield Static("Escape takes these settings and closes", classes="hint")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Take a value, or say why not."""
        name = event.input.id or ""
        meaning = self.query_one(f"#{name}", Input).parent
        assert meaning is not None
        text = meaning.query_one(".meaning", Static)
        try:
            self._conversation.params = with_setting(self._conversation.params, name, event.value)
        except InvalidRequestError as error:
            event.input.add_class("-invalid")
            text.update(Content(str(error)))
        else:
            event.input.remove_class("-invalid")
            text.update(Content(SETTINGS[name]))

    def action_finish(self) -> None:
        """Take the system message too."""
        self._conversation.system = self.query_one(TextArea).text.strip()
        self.dismiss(True)
