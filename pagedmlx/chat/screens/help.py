"""What help says: all keys and commands."""

from __future__ import annotations

from typing import Final

from pagedmlx.chat.commands import COMMANDS

HELP: Final = {
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
    "Commands": tuple((f"/{each.name} {each.usage}", each.help) for each in COMMANDS),
}
