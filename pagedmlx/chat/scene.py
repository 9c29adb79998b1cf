"""The demo's scene: someone uses the chat, so that pictures show all of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedmlx.chat.app import ChatApp
    from pagedmlx.chat.widgets.pane import ConversationPane

SKY = "Why is the sky blue?"
PAGING = "How does paging work for a KV cache?"
NAME = "Think of a name for a small program."


async def play(app: ChatApp, pause_s: float = 1.0) -> None:
    """Two conversations at once, a branch that shares blocks, and candidates side by side.

    Args:
        app: Plays in it.
        pause_s: Time between two things that happen.
    """
    first = app.pane
    await first.send(SKY)
    await asyncio.sleep(pause_s)
    second = await app.open(app.new_conversation())
    await second.send(PAGING)
    await _answered(first, second)
    await asyncio.sleep(pause_s)
    await second.branch()
    branch = app.pane
    await branch.send(NAME, 3)
    await second.send("And what does it cost?")
    await _answered(second, branch)


async def _answered(*panes: ConversationPane) -> None:
    while any(pane.is_busy for pane in panes):
        await asyncio.sleep(0.05)
