"""Carries out the slash commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pagedmlx.chat.commands import Command, message_text, obey_set, with_setting
from pagedmlx.chat.reasoning import code_blocks
from pagedmlx.chat.screens.page import PageScreen
from pagedmlx.chat.screens.stats import stats_page
from pagedmlx.chat.store import export
from pagedmlx.errors import PagedMLXError

if TYPE_CHECKING:
    from pagedmlx.chat.app import ChatApp
    from pagedmlx.chat.widgets.pane import ConversationPane


async def obey(app: ChatApp, pane: ConversationPane, command: Command, rest: str) -> None:
    """Do what a command says.

    Raises:
        PagedMLXError: It can't be done; the user is to be told.
    """
    conversation = pane.conversation
    match command.name:
        case "help":
            app.action_help()
        case "new":
            await app.action_new()
        case "close":
            await app.close_pane(pane)
        case "model" if rest or not app.options.can_pick:
            app.load(rest or app.options.model or "")
        case "model":
            app.pick_model()
        case "system" if not rest:
            app.action_settings()
        case "system":
            conversation.system = "" if rest == "-" else message_text(rest)
            pane.show_status()
        case "set" if not rest:
            app.action_settings()
        case "set":
            conversation.params, said = obey_set(conversation.params, rest)
            pane.show_status()
            app.tell(said)
        case "n":
            await _candidates(pane, rest)
        case "retry":
            await pane.retry()
        case "edit":
            pane.edit()
        case "branch":
            await pane.branch()
        case "save" if rest:
            path = Path(rest).expanduser()
            export(conversation, path)
            app.tell(f"written to {path}")
        case "save":
            app.store.save(conversation, conversation.created_s)
            app.tell(f"saved in {app.store.path or 'memory only'}")
        case "load":
            app.action_saved(rest)
        case "rename":
            _rename(app, pane, rest)
        case "delete" if rest not in ("", "yes"):
            raise PagedMLXError(
                f"/delete is of this conversation, not of {rest!r}", hint="/load finds others"
            )
        case "delete" if not rest and conversation.messages:
            app.tell(f"/delete yes deletes “{conversation.shown_title}” for good")
        case "delete":
            await pane.discard()
            app.store.delete(conversation.conversation_id)
            await app.close_pane(pane)
        case "clear":
            await pane.clear()
        case "copy":
            _copy(app, pane, rest)
        case "stats":
            await _stats(app)
        case "quit":
            app.action_leave()


async def _candidates(pane: ConversationPane, rest: str) -> None:
    count, _, question = rest.partition(" ")
    params = with_setting(pane.conversation.params, "n", count)
    if question.strip():
        await pane.send(message_text(question), params.n)
    else:
        pane.conversation.params = params
        pane.show_status()


def _rename(app: ChatApp, pane: ConversationPane, title: str) -> None:
    if not title:
        raise PagedMLXError("/rename needs a title", hint="/rename My title")
    pane.conversation.title = " ".join(message_text(title).split())
    app.save(pane.conversation)
    app.note_change(pane)


def _copy(app: ChatApp, pane: ConversationPane, what: str) -> None:
    text = pane.last_answer
    what, _, number = what.partition(" ")
    if what == "code":
        blocks = code_blocks(text)
        wanted = number.strip() or str(len(blocks))
        if blocks and wanted not in map(str, range(1, len(blocks) + 1)):
            raise PagedMLXError(f"/copy code {wanted} must be between 1 and {len(blocks)}")
        text = blocks[int(wanted) - 1] if blocks else ""
    if text:
        app.copy(text)
    else:
        app.tell("there is nothing to copy yet")


async def _stats(app: ChatApp) -> None:
    snapshot = await app.client.snapshot() if app.client is not None else None
    if snapshot is None:
        app.tell("nothing tells what the engine has counted")
    else:
        app.push_screen(PageScreen(stats_page(snapshot.stats)))
