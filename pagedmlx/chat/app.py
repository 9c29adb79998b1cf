"""ChatApp: tabs of conversations beside the map of the memory that they live in."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.containers import Container
from textual.screen import Screen
from textual.theme import Theme
from textual.widgets import ContentSwitcher, Footer, TabbedContent, TextArea

from pagedmlx.chat import clipboard
from pagedmlx.chat.client import ChatClient
from pagedmlx.chat.commands import Command, message_text, parse
from pagedmlx.chat.keys import KEYS
from pagedmlx.chat.loading import Loading
from pagedmlx.chat.obey import obey
from pagedmlx.chat.options import ChatOptions
from pagedmlx.chat.saving import Saving
from pagedmlx.chat.screens.help import HELP
from pagedmlx.chat.screens.page import PageScreen
from pagedmlx.chat.screens.picker import PickerScreen
from pagedmlx.chat.screens.saved import SavedScreen
from pagedmlx.chat.screens.settings import SettingsScreen
from pagedmlx.chat.session import Conversation
from pagedmlx.chat.store import Store, StoreError
from pagedmlx.chat.terminal import Terminal
from pagedmlx.chat.watching import Watching
from pagedmlx.chat.widgets.banner import Banner
from pagedmlx.chat.widgets.block_map import BlockMap
from pagedmlx.chat.widgets.markdown import GrowingMarkdown
from pagedmlx.chat.widgets.pane import ConversationPane
from pagedmlx.chat.widgets.panel import MemoryPanel
from pagedmlx.errors import PagedMLXError

_SAVE_S = 1.0
_AGAIN_S = 2.0
"""Two presses of Ctrl+C within this time leave."""

_APART = frozenset({"close", "delete", "stats"})
"""They end the pane that passes them on, or wait for an endpoint; others are obeyed in order."""


class ChatApp(App[int]):
    """The application; its result is the exit code.

    Args:
        options: What it begins with.
    """

    CSS_PATH = "chat.tcss"
    TITLE = "pagedmlx"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = list(KEYS)

    def __init__(self, options: ChatOptions) -> None:
        super().__init__(driver_class=Terminal)
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (170, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-short"), (18, "-tall")]
        # One that moves is drawn sixty times a second, and the model waits.
        self.animation_level = "none"
        self.options = options
        self.prompts: list[str] = []
        self.left_behind = False
        self._base_params = options.params
        self._loading = Loading(options.make_client)
        self._slot_of: dict[str, int] = {}
        self._interrupted_s = float("-inf")
        self._leaving = False
        self._accepted_loss = ""
        self.watching = Watching(self)
        self.saving = Saving(options.store_path, self._complain_later)

    def compose(self) -> ComposeResult:
        """Build the screen."""
        yield Banner()
        with Container(id="main"):
            yield TabbedContent()
            yield MemoryPanel(self._slot_of, self._title_of)
        yield Footer(compact=True)

    async def on_mount(self) -> None:
        """Begin with one conversation and the model."""
        if self.saving.theme in self.available_themes:
            self.theme = self.saving.theme
        self.theme_changed_signal.subscribe(self, self._take_theme)
        await self.open(self.new_conversation())
        self.set_interval(_SAVE_S, self._save_all)
        self.run_worker(self.watching.run(), group="watch")
        if self.options.model is None:
            self.pick_model()
        else:
            self.load(self.options.model)

    # The model.

    def load(self, name: str) -> None:
        """Take another model; what is under way with the last one stops."""
        self.run_worker(self._load(name), group="load", exclusive=True, exit_on_error=False)

    @property
    def client(self) -> ChatClient | None:
        """Who answers, once the model is loaded."""
        return self._loading.client

    @property
    def store(self) -> Store:
        """Where conversations are kept."""
        return self.saving.store

    async def ready_client(self) -> ChatClient:
        """Who answers, as soon as the model is loaded."""
        return await self._loading.ready()

    def pick_model(self, problem: str = "") -> None:
        """Let the user choose a model."""

        def take(name: str | None) -> None:
            if name is not None:
                self.load(name)
            elif self.client is None:
                self.query_one(Banner).say("no model yet: /model chooses one, Ctrl+Q leaves")

        if self.options.can_pick:
            self.push_screen(PickerScreen(problem), take)
        else:
            self.query_one(Banner).say(f"{problem}; /model tries again, Ctrl+Q leaves")

    def show_loading(self) -> None:
        """Say how far the loading is, if a model is being loaded."""
        if self._loading.stage is not None:
            self.query_one(Banner).say_stage(*self._loading.stage)

    async def _load(self, name: str) -> None:
        before = self._loading.give_up()
        if before is not None:
            for pane in self.panes:
                await pane.stopped()
            await before.close()
        try:
            client = await self._loading.take(name)
        except Exception as error:
            self.query_one(Banner).say("")
            hint = f" ({error.hint})" if isinstance(error, PagedMLXError) and error.hint else ""
            reason = f"{error or type(error).__name__}{hint}"
            named = reason if name in reason else f"{name}: {reason}"
            self.pick_model(named)
            return
        self.query_one(Banner).say("")
        own = {k: v for k, v in client.defaults.items() if k not in self.options.given}
        before_params, self._base_params = self._base_params, replace(self.options.params, **own)
        for pane in self.panes:
            pane.model_name, pane.max_len = client.name, client.max_len
            if pane.conversation.params == before_params:
                pane.conversation.params = self._base_params
            await pane.sync()
            pane.show_status()
        if self.options.scene is not None:
            self.run_worker(self.options.scene(self), exit_on_error=False)  # type: ignore[arg-type]

    # Conversations.

    @property
    def is_dark(self) -> bool:
        """Whether the theme is a dark one."""
        return self.current_theme.dark

    def _take_theme(self, theme: Theme) -> None:
        self.saving.keep_theme(theme.name)
        for pane in self.panes:
            self.tabs.get_tab(str(pane.id)).label = pane.tab_title

    @property
    def tabs(self) -> TabbedContent:
        """All conversations that are open."""
        return self.query_one(TabbedContent)

    @property
    def panes(self) -> list[ConversationPane]:
        """Their panes, in order."""
        within = self.tabs.query_one(ContentSwitcher).children
        return [each for each in within if isinstance(each, ConversationPane)]

    @property
    def pane(self) -> ConversationPane:
        """The one that is looked at."""
        pane = self.tabs.active_pane
        return pane if isinstance(pane, ConversationPane) else self.panes[0]

    def new_conversation(self) -> Conversation:
        """One with nothing in it."""
        return Conversation(system=self.options.system, params=self._base_params)

    async def open(self, conversation: Conversation) -> ConversationPane:
        """Show a conversation, in a new tab unless it has one."""
        for pane in self.panes:
            if pane.conversation.conversation_id == conversation.conversation_id:
                self.tabs.active = str(pane.id)
                return pane
        taken = {pane.slot for pane in self.panes}
        slot = next(each for each in range(len(taken) + 1) if each not in taken)
        pane = ConversationPane(conversation, slot, self)
        if self.client is not None:
            pane.model_name, pane.max_len = self.client.name, self.client.max_len
        await self.tabs.add_pane(pane)
        self.tabs.active = str(pane.id)
        pane.prompt.focus()
        return pane

    async def close_pane(self, pane: ConversationPane) -> None:
        """Close a tab; the last one is followed by a new one."""
        await pane.stopped()
        self.save(pane.conversation)
        if len(self.panes) == 1:
            await self.open(self.new_conversation())
        await self.tabs.remove_pane(str(pane.id))
        self.pane.prompt.focus()

    async def submit(self, pane: ConversationPane, text: str) -> None:
        """Obey a command, or send a message; what is refused is put back into the prompt."""
        try:
            command = parse(text)
        except PagedMLXError as error:
            self._refuse(pane, text, error)
            return
        work = self._carry_out(pane, text, command)
        if command is not None and command[0].name in _APART:
            self.run_worker(work)
        else:
            await work

    async def _carry_out(
        self, pane: ConversationPane, text: str, command: tuple[Command, str] | None
    ) -> None:
        try:
            if command is None:
                await pane.send(message_text(text))
            else:
                self.prompts.append(text.strip())
                await obey(self, pane, *command)
        except Exception as error:
            self._refuse(pane, text, error)

    def _refuse(self, pane: ConversationPane, text: str, error: Exception) -> None:
        pane.prompt.put_back(text)
        hint = error.hint if isinstance(error, PagedMLXError) else type(error).__name__
        self.tell(f"{error}. {hint}".strip(), error=True)

    def _complain_later(self, text: str) -> None:
        # The first complaint may come before there is a screen.
        self.call_later(lambda: self.tell(text, error=True))

    def save(self, conversation: Conversation) -> None:
        """Keep a conversation; a failure is told, and tried again later."""
        self.saving.save(conversation)

    def _save_all(self) -> None:
        self.saving.save_all(pane.conversation for pane in self.panes)

    def is_unsaved(self, conversation: Conversation) -> bool:
        """Whether a conversation could not be kept."""
        return self.saving.is_unsaved(conversation)

    # What panes tell.

    def note_request(self, request_id: str, pane: ConversationPane) -> None:
        """The block map is to know whose this request is."""
        self._slot_of[request_id] = pane.slot

    def note_change(self, pane: ConversationPane) -> None:
        """Show a pane's title anew."""
        self.tabs.get_tab(str(pane.id)).label = pane.tab_title
        if not pane.is_busy and pane is not self.pane:
            self.tell(f"{pane.tab_title.plain} has its answer")

    def tell(self, text: str, *, error: bool = False) -> None:
        """Show a notice."""
        severity = "error" if error else "information"
        self.notify(text, severity=severity, timeout=8.0 if error else 3.0, markup=False)

    def copy(self, text: str) -> None:
        """Put a text into the clipboard: of the terminal, and of a Mac that one sits at."""
        self.copy_to_clipboard(text)
        clipboard.put(text)
        self.tell(f"copied {len(text)} characters")

    # Events and actions.

    def on_tabbed_content_tab_activated(self) -> None:
        """Draw what came while the conversation was hidden."""
        self.pane.draw()
        if isinstance(self.focused, TextArea | None) and len(self.screen_stack) == 1:
            self.pane.prompt.focus()

    def on_key(self, event: events.Key) -> None:
        """What is typed where nothing takes it belongs to the prompt."""
        is_wanted = event.key in self.screen.active_bindings or len(self.screen_stack) > 1
        if event.is_printable and event.character and not is_wanted:
            event.prevent_default()
            self.screen.set_focus(self.pane.prompt)
            self.pane.prompt.insert(event.character)

    def on_growing_markdown_copy_wanted(self, event: GrowingMarkdown.CopyWanted) -> None:
        """Copy a code block."""
        self.copy(event.code)

    def action_help(self) -> None:
        """Show all keys and commands."""
        self.push_screen(PageScreen(HELP))

    async def action_new(self) -> None:
        """Open a new conversation."""
        await self.open(self.new_conversation())

    async def action_close_tab(self) -> None:
        """Close the conversation that is looked at."""
        await self.close_pane(self.pane)

    def action_turn_tab(self, by: int) -> None:
        """Go to another conversation."""
        panes = self.panes
        self.tabs.active = str(panes[(panes.index(self.pane) + by) % len(panes)].id)

    def action_toggle_memory(self) -> None:
        """Show or hide the memory; hidden, the engine isn't asked."""
        self.query_one(MemoryPanel).toggle_class("-hidden")

    def action_focus_map(self) -> None:
        """Go to the block map, and from there back."""
        blocks = self.query_one(BlockMap)
        if blocks.has_focus:
            self.pane.prompt.focus()
        else:
            self.query_one(MemoryPanel).remove_class("-hidden")
            blocks.focus()

    def action_settings(self) -> None:
        """Show how answers are sampled."""
        pane = self.pane
        self.push_screen(SettingsScreen(pane.conversation), lambda _: pane.show_status())

    def action_saved(self, words: str = "") -> None:
        """Open a saved conversation."""

        async def take(conversation_id: str | None) -> None:
            if conversation_id is not None:
                try:
                    await self.open(self.store.load(conversation_id))
                except StoreError as error:
                    self.tell(str(error), error=True)

        self._save_all()
        self.push_screen(SavedScreen(self.store, words), take)

    def action_stop(self) -> None:
        """Stop the answer that is looked at, and go back to the prompt."""
        self.pane.stop()
        self.pane.prompt.focus()

    def action_interrupt(self) -> None:
        """Copy what is selected, else stop the answer, else leave when it is pressed again."""
        focused = self.focused
        selected = focused.selected_text if isinstance(focused, TextArea) else ""
        selected = selected or self.screen.get_selected_text() or ""
        now_s = time.monotonic()
        if selected:
            self.copy(selected)
        elif self.pane.stop():
            pass
        elif now_s - self._interrupted_s < _AGAIN_S:
            self.action_leave()
        else:
            self._interrupted_s = now_s
            self.tell("Ctrl+C once more, or Ctrl+Q, leaves")

    def action_leave(self, code: int = 0) -> None:
        """Leave: stop everything, save, and give the terminal back.

        Args:
            code: The exit code; 0 if the user wants to leave, who is asked if text would be lost.
        """
        self._save_all()
        problem = self.saving.problem
        if problem and problem != self._accepted_loss and not code:
            self._accepted_loss = problem
            self.tell(
                f"{problem}. /save FILE writes it elsewhere; again leaves all the same", error=True
            )
        elif not self._leaving:
            self._leaving = True
            self.run_worker(self._leave(code), exit_on_error=False)

    async def action_quit(self) -> None:
        """Leave, from the command palette."""
        self.action_leave()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What the command palette has beside Textual's own."""
        yield from super().get_system_commands(screen)
        yield SystemCommand("New conversation", "Open another tab", self.action_new)
        yield SystemCommand("Model", "Take another model", self.pick_model)
        yield SystemCommand("Settings", "How answers are sampled", self.action_settings)
        yield SystemCommand("Saved conversations", "Search and open", self.action_saved)
        yield SystemCommand("Branch", "Go on from here in a new tab", lambda: self.pane.branch())

    async def _leave(self, code: int) -> None:
        for group in ("load", "watch"):
            self.workers.cancel_group(self, group)
        for pane in self.panes:
            pane.stop()
        for pane in self.panes:
            await pane.stopped()
        self._save_all()
        self.left_behind = not await self._loading.close()
        self.store.close()
        self.exit(code, return_code=code)

    def _title_of(self, slot: int) -> str:
        titles = (each.conversation.shown_title for each in self.panes if each.slot == slot)
        return next(titles, "") or "new"
