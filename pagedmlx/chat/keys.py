"""The keys that work everywhere in the chat."""

from __future__ import annotations

from typing import Final

from textual.binding import Binding

KEYS: Final = (
    Binding("f1", "help", "Help"),
    Binding("f2", "toggle_memory", "Memory"),
    Binding("f3", "focus_map", "Map", show=False),
    Binding("f4", "settings", "Settings"),
    Binding("f5", "saved", "Saved"),
    Binding("ctrl+t", "new", "New"),
    Binding("f6,ctrl+pagedown", "turn_tab(1)", "Next tab", show=False, priority=True),
    Binding("shift+f6,ctrl+pageup", "turn_tab(-1)", "Previous tab", show=False, priority=True),
    Binding("f8", "close_tab", "Close tab", show=False),
    Binding("escape", "stop", "Stop", show=False),
    Binding("ctrl+c", "interrupt", "Stop", show=False, priority=True),
    Binding("ctrl+q", "leave", "Quit", priority=True),
)
