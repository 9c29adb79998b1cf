"""ConversationPane: one conversation in its tab, with its answers under way and its draft."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Protocol

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import TabPane
from textual.worker import Worker, WorkerCancelled, WorkerFailed

from pagedmlx.chat.answers import Progress, write_answers
from pagedmlx.chat.client import ChatClient
from pagedmlx.chat.reasoning import code_blocks, split_reasoning
from pagedmlx.chat.session import ASSISTANT, USER, Conversation, new_id
from pagedmlx.chat.widgets.block_map import colour, letter
from pagedmlx.chat.widgets.gauges import Rates, bar
from pagedmlx.chat.widgets.line import Line
from pagedmlx.chat.widgets.message import MessageView
from pagedmlx.chat.widgets.prompt import Prompt
from pagedmlx.chat.widgets.transcript import Transcript
from pagedmlx.core.stats import EngineStats
from pagedmlx.errors import PagedMLXError
from pagedmlx.text.visible import visible

_TITLE_LENGTH = 18


class Host(Protocol):
    """What a pane needs of the application."""

    prompts: list[str]

    @property
    def is_dark(self) -> bool:
        """Whether the theme is a dark one."""
        ...

    async def ready_client(self) -> ChatClient:
        """The client, once the model is loaded."""
        ...

    async def submit(self, pane: ConversationPane, text: str) -> None:
        """Obey a command, or give a message back to ``pane.send``."""
        ...

    async def open(self, conversation: Conversation) -> ConversationPane:
        """Show a conversation in a new tab."""
        ...

    def tell(self, text: str, *, error: bool = False) -> None:
        """Show a notice."""
        ...

    def save(self, conversation: Conversation) -> None:
        """Keep a conversation; never raises."""
        ...

    def is_unsaved(self, conversation: Conversation) -> bool:
        """Whether a conversation could not be kept."""
        ...

    def note_request(self, request_id: str, pane: ConversationPane) -> None:
        """The block map is to know whose this request is."""
        ...

    def note_change(self, pane: ConversationPane) -> None:
        """A pane's title, or whether it is busy, has changed."""
        ...

    def copy(self, text: str) -> None:
        """Put a text into the clipboard."""
        ...


class ConversationPane(TabPane):
    """A conversation on the screen.

    Args:
        conversation: What to show and to continue.
        slot: Its place on the block map.
        host: The application.
    """

    def __init__(self, conversation: Conversation, slot: int, host: Host) -> None:
        self.conversation = conversation
        self.slot = slot
        self.model_name = ""
        self.max_len: int | None = None
        self.progress = Progress()
        self._host = host
        self._candidates: tuple[int, ...] = ()
        self._editing: int | None = None
        self._work: Worker[None] | None = None
        self._num_asked = 0
        self._asked: Sequence[int] = ()
        self._rates = Rates()
        super().__init__(self.tab_title, id=f"c-{new_id()}")

    @property
    def tab_title(self) -> Content:
        """What the tab says."""
        title = self.conversation.shown_title or "new"
        cut = title if len(title) <= _TITLE_LENGTH else title[: _TITLE_LENGTH - 1] + "…"
        mark = "▸ " if self.is_busy else ""
        return Content.assemble(
            (letter(self.slot), f"bold {colour(self.slot, self._host.is_dark)}"),
            f" {mark}{visible(cut)}",
        )

    @property
    def is_busy(self) -> bool:
        """Whether an answer is under way."""
        return self._work is not None and not self._work.is_finished

    @property
    def prompt(self) -> Prompt:
        """Where the user writes."""
        return self.query_one(Prompt)

    @property
    def transcript(self) -> Transcript:
        """The messages."""
        return self.query_one(Transcript)

    @property
    def last_answer(self) -> str:
        """The last shown answer, without its reasoning."""
        answers = [each.text for each in self.conversation.path() if each.role == ASSISTANT]
        return split_reasoning(answers[-1]).answer if answers else ""

    def compose(self) -> ComposeResult:
        """Build the parts."""
        yield Transcript(self.conversation)
        yield Line(classes="status")
        yield Prompt(self._host.prompts)

    async def on_mount(self) -> None:
        """Show what there is."""
        await self.sync()
        self.show_status()

    # What the user can do.

    async def send(self, text: str, n: int | None = None) -> None:
        """Send a message, or the new form of the one that is being edited.

        Args:
            text: What it says.
            n: Number of candidate answers, if not the conversation's own.

        Raises:
            PagedMLXError: An answer is under way.
        """
        if self.is_busy:
            raise PagedMLXError("still answering", hint="Escape stops it")
        parent_id = None
        if self._editing is not None:
            parent_id = self.conversation.messages[self._editing].parent_id
        self._editing, self._candidates = None, ()
        self.conversation.add(USER, text, parent_id=parent_id)
        self._host.prompts.append(text)
        await self._ask(n)

    async def retry(self, message_id: int | None = None) -> None:
        """Write another version of an answer, by default of the last one."""
        path = self.conversation.path()
        if not path:
            self._host.tell("there is nothing to answer yet")
        elif self.is_busy:
            self._host.tell("still answering; Escape stops it")
        else:
            at = path[-1] if message_id is None else self.conversation.messages[message_id]
            self._candidates = ()
            await self._ask(None, at.parent_id if at.role == ASSISTANT else at.message_id)

    def edit(self, message_id: int | None = None) -> None:
        """Put a message of the user, by default the last one, into the prompt to change it."""
        sent = [each for each in self.conversation.path() if each.role == USER]
        if message_id is None and sent:
            message_id = sent[-1].message_id
        if message_id is None:
            self._host.tell("there is nothing to edit yet")
            return
        self._editing = message_id
        self.prompt.put(self.conversation.messages[message_id].text)
        self.prompt.focus()
        self.show_status()

    async def branch(self, message_id: int | None = None) -> None:
        """Go on from a message, by default the last one, in a new tab."""
        path = self.conversation.path()
        if not path:
            self._host.tell("there is nothing to branch from yet")
            return
        at = path[-1].message_id if message_id is None else message_id
        await self._host.open(self.conversation.branch(at))

    def stop(self) -> bool:
        """Stop the answer under way, or end editing; whether there was either."""
        if self._work is not None and self.is_busy:
            self._work.cancel()
            return True
        was_editing, self._editing = self._editing is not None, None
        if was_editing:
            self.prompt.begin_anew()
            self.show_status()
        return was_editing

    async def stopped(self) -> None:
        """Stop the answer under way, and wait until it has ended."""
        if self._work is not None and self.is_busy:
            self._work.cancel()
            with contextlib.suppress(WorkerCancelled, WorkerFailed):
                await self._work.wait()

    async def pick(self, message_id: int) -> None:
        """Keep one of the candidates as the answer; the others go on as versions of it."""
        self.conversation.choose(message_id)
        self._host.save(self.conversation)
        self._candidates = ()
        await self.sync()
        self.show_status()
        self.prompt.focus()

    async def clear(self) -> None:
        """Begin another conversation with the same settings; the last one stays saved."""
        await self.stopped()
        self._host.save(self.conversation)
        await self._begin_another()

    async def discard(self) -> None:
        """The same, and nothing is left of the last one here, saved or not."""
        await self.stopped()
        await self._begin_another()

    async def _begin_another(self) -> None:
        before = self.conversation
        self.conversation = Conversation(system=before.system, params=before.params)
        self.transcript.conversation = self.conversation
        self._candidates, self._editing, self.progress = (), None, Progress()
        self._asked = ()
        await self.sync()
        self.show_status()
        self._host.note_change(self)

    # Answers.

    async def _ask(self, n: int | None, parent_id: int | None = None) -> None:
        count = self.conversation.params.n if n is None else n
        first = self.conversation.add(ASSISTANT, parent_id=parent_id)
        others = [
            self.conversation.add(ASSISTANT, parent_id=first.parent_id) for _ in range(count - 1)
        ]
        ids = (first.message_id, *(each.message_id for each in others))
        self.conversation.choose(first.message_id)
        self._candidates = ids if count > 1 else ()
        self._asked, self._rates = ids, Rates()
        self._work = self.run_worker(self._answer(ids), exit_on_error=False)
        self._host.save(self.conversation)
        # All of it is laid out once.
        with self.app.batch_update():
            self._host.note_change(self)
            await self.sync()
            self.transcript.follow()
        if self.display:
            self.prompt.focus()

    async def _answer(self, ids: Sequence[int]) -> None:
        self._num_asked += 1
        request_id = f"{self.conversation.conversation_id}-{ids[0]}-{self._num_asked}"
        self._host.note_request(request_id, self)
        try:
            await write_answers(
                self._host.ready_client, self.conversation, ids, request_id, self.progress
            )
        finally:
            self._host.save(self.conversation)
            if self.is_attached:
                self.call_later(self._finish)

    def draw(self) -> None:
        """Show what has come since the last time."""
        dirty, self.progress.dirty = self.progress.dirty, set()
        if dirty:
            self.transcript.refresh_messages(dirty)

    def _finish(self) -> None:
        self.draw()
        self.show_status()
        self._host.note_change(self)

    # What it shows.

    async def sync(self, at: int | None = None) -> None:
        """Show the path as it is now, and this one among the candidates."""
        await self.transcript.sync(self._candidates, speaker=self.model_name, at=at)

    def show_status(self) -> None:
        """How much of the context is taken, and how answers are sampled."""
        written = sum(self.conversation.messages[each].num_tokens for each in self._asked)
        self._rates.add(EngineStats(num_output_tokens=written), time.monotonic())
        self.query_one(".status", Line).say(Content(self._status()))

    def _status(self) -> str:
        if self._editing is not None:
            return "editing: Enter sends it as a new version, Escape leaves it as it was"
        if self._candidates and not self.is_busy:
            return "Ctrl+↑, Enter picks an answer; a new message goes on with the first"
        params, taken = self.conversation.params, self.progress.num_tokens
        parts = ["not saved"] if self._host.is_unsaved(self.conversation) else []
        parts.append(self.model_name or "no model yet")
        if taken is not None:
            limit = f"/{self.max_len} {bar(taken / self.max_len, 6)}" if self.max_len else ""
            parts.append(f"{taken}{limit} tokens")
        if self.progress.num_cached_tokens:
            parts.append(f"{self.progress.num_cached_tokens} reused")
        if self.is_busy:
            # Now it is of more interest than the settings.
            parts.append(f"{self._rates.tokens_per_s:.0f} tok/s")
            if self.progress.ttft_s is not None:
                parts.append(f"first in {self.progress.ttft_s:.1f} s")
            return " · ".join(parts)
        parts.append(f"temp {params.temperature:g}")
        if params.n > 1:
            parts.append(f"{params.n} candidates")
        if self.conversation.system:
            parts.append("system message")
        return " · ".join(parts)

    # Events.

    async def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        """Send the draft, or obey the command that it is."""
        event.stop()
        if event.text.strip():
            await self._host.submit(self, event.text)

    def on_prompt_left(self, event: Prompt.Left) -> None:
        """Move in the transcript."""
        event.stop()
        match event.where:
            case "up":
                self.transcript.focus_neighbour(None, -1)
            case "page_up":
                self.transcript.scroll_page_up(animate=False)
            case _:
                self.transcript.scroll_page_down(animate=False)

    async def on_message_view_wished(self, event: MessageView.Wished) -> None:
        """Do what the user wants done with a message."""
        event.stop()
        message = event.view.message
        match event.wish:
            case "previous":
                self.transcript.focus_neighbour(event.view, -1)
            case "next":
                if not self.transcript.focus_neighbour(event.view, 1):
                    self.prompt.focus()
            case "edit":
                self.edit(message.message_id if message.role == USER else message.parent_id)
            case "retry":
                await self.retry(message.message_id)
            case "branch":
                await self.branch(message.message_id)
            case "copy":
                self._host.copy(split_reasoning(message.text).answer)
            case "copy_code":
                self._copy_code(message.text)
            case "older" | "newer":
                await self._turn(message.message_id, 1 if event.wish == "newer" else -1)
            case "pick" if message.message_id in self._candidates:
                await self.pick(message.message_id)

    def _copy_code(self, text: str) -> None:
        blocks = code_blocks(text)
        if blocks:
            self._host.copy(blocks[-1])
        else:
            self._host.tell("there is no code block in this message")

    async def _turn(self, message_id: int, by: int) -> None:
        if message_id in self._candidates:
            place = self._candidates.index(message_id) + by
            other = self._candidates[min(max(place, 0), len(self._candidates) - 1)]
        else:
            other = self.conversation.other_version(message_id, by)
        if other == message_id:
            self.transcript.focus_neighbour(self.transcript.view(message_id), by)
            return
        if message_id not in self._candidates:
            self._candidates = ()
            self.conversation.choose(other)
            self._host.save(self.conversation)
        await self.sync(other)
        view = self.transcript.view(other)
        if view is not None:
            view.focus()
