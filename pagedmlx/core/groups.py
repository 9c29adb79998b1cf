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


class Windows:
    """Which of a sequence's blocks each group still needs.

    A window passes blocks only where some group keeps every token: its chain of prefix entries is
    what proves the content of the blocks that are left. Without one all groups keep everything.

    Args:
        groups: The model's KV groups.
        block_size: Tokens in one block.
        max_chunk: Most tokens of a sequence that one step computes.

    Attributes:
        groups: As given.
        anchor: The first group that keeps everything.
        keeping: Groups that keep every block of a sequence.
        passing: Groups whose window gives blocks back.
    """

    def __init__(self, groups: tuple[KVGroup, ...], block_size: int, max_chunk: int) -> None:
        self.groups = groups
        self._block_size = block_size
        self._max_chunk = max_chunk
        has_full = any(group.kind is KVGroupKind.FULL for group in groups)
        kinds = [has_full and group.kind is KVGroupKind.WINDOW for group in groups]
        self.keeping = tuple(index for index, passes in enumerate(kinds) if not passes)
        self.passing = tuple(index for index, passes in enumerate(kinds) if passes)
        self.anchor = self.keeping[0]

    def first_needed(self, group: int, position: int) -> int:
        """The first block of a group that a query at ``position`` or later sees."""
        window = self.groups[group].window
        if window is None or group not in self.passing:
            return 0
        return max(0, position - window + 1) // self._block_size

    def num_held(self, group: int, num_blocks: int) -> int:
        """Most blocks of a group that a sequence of so many blocks holds at once."""
        window = self.groups[group].window
        if window is None or group not in self.passing:
            return num_blocks
        # What the token before a chunk sees, and the chunk. The one before that stays until it has
        # been indexed.
        num_tokens = max(window, self._max_chunk) + self._max_chunk
        return min(num_blocks, -(-num_tokens // self._block_size) + 1)
