"""Attention over blocks, in several interchangeable backends."""

from __future__ import annotations

from pagedmlx.ops.base import AttentionBackend
from pagedmlx.ops.paths import AttentionPath, attention_paths

__all__ = ["AttentionPath", "attention_paths", "make_backend"]


def make_backend(name: str) -> AttentionBackend:
    """Make the attention backend of that name; ``auto`` is the fastest that should work here.

    Raises:
        InvalidRequestError: There is no such backend here.
    """
    return attention_paths(name)[0].backend
