"""Runs the application on the terminal."""

from __future__ import annotations

import asyncio

from pagedmlx.chat.app import ChatApp
from pagedmlx.chat.options import ChatOptions
from pagedmlx.chat.terminal import signals_leave


def run_app(options: ChatOptions) -> tuple[int, bool, str]:
    """Run the chat until the user leaves; the terminal is as before afterwards.

    Returns:
        The exit code; whether everything has ended, for if not, the process should not wait; and
        what could not be saved, or nothing.
    """
    app = ChatApp(options)
    # Not asyncio.run: at its end it would wait for threads that download or compute.
    loop = asyncio.new_event_loop()

    def leave(code: int) -> None:
        loop.call_soon_threadsafe(app.call_later, app.action_leave, code)

    with signals_leave(leave):
        code = loop.run_until_complete(app.run_async())
    problem = app.saving.problem
    return code or app.return_code or int(bool(problem)), not app.left_behind, problem
