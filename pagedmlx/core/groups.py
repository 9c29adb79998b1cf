"""KV groups: layers that keep the same span of history, and so share one pool and one table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class KVGroupKind(StrEnum):
    """What the layers of a group remember of a sequence.

    Layers with a recurrent state have no blocks: they are in no group, and the core doesn't know
    of them.
    """

    FULL = "full"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A set of layers with one block pool and one block table per sequence.

    Attributes:
        kind: FULL keeps every token, WINDOW the last ``window`` tokens (the current one included).
        layers: Indexes into the model's list of layer caches, ascending.
        window: Number of tokens that a query sees, itself included; None unless WINDOW.
    """

    kind: KVGroupKind
    layers: tuple[int, ...]
    window: int | None = None

    def __post_init__(self) -> None:
        assert (self.window is not None) == (self.kind is KVGroupKind.WINDOW)
        assert self.layers == tuple(sorted(set(self.layers)))
