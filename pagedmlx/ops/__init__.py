"""Attention over blocks, in several interchangeable backends."""

from __future__ import annotations

from pagedmlx.errors import InvalidRequestError
from pagedmlx.ops.base import AttentionBackend
from pagedmlx.ops.gather import GatherBackend
from pagedmlx.ops.reference import ReferenceBackend

__all__ = ["make_backend"]


def make_backend(name: str) -> AttentionBackend:
    """Make the attention backend of that name; ``auto`` is the fastest that works here.

    Raises:
        InvalidRequestError: There is no such backend.
    """
    match name:
        case "auto" | "gather":
            return GatherBackend()
        case "reference":
            return ReferenceBackend()
        case _:
            choices = "auto, gather or reference"
            raise InvalidRequestError("attention_backend", f"{name!r} must be {choices}")
