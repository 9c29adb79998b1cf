"""Screens that lie over the chat for a moment."""
