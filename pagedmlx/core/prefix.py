"""PrefixIndex: finds the block that already holds the K and V of a run of tokens.

Content hashes are chained block by block, as in vLLM's automatic prefix caching and SGLang's
RadixAttention (Zheng et al., 2024, section 3), and the tokens are compared on every hit, along
the whole chain, so that a collision can't serve another prompt's K and V.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pagedmlx.core.block import Block

HashFunction = Callable[[bytes, Sequence[int]], bytes]
"""Maps (parent's hash, the block's token ids) to the block's hash."""


def hash_tokens(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The default ``HashFunction``: 16 bytes of blake2b over the parent's hash and the tokens."""
    data = np.asarray(token_ids, dtype="<i8").tobytes()
    return hashlib.blake2b(data, key=parent[:64], digest_size=16).digest()


def root_hash(*salts: str) -> bytes:
    """The parent of a first block: what must agree besides the tokens.

    Args:
        salts: The model's identity, the KV type, the caller's salt, ...
    """
    digest = hashlib.blake2b(digest_size=16)
    for salt in salts:
        data = salt.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


@dataclass(frozen=True, eq=False, slots=True)
class PrefixEntry:
    """One indexed block with what proves its content.

    Attributes:
        block: Holds K and V of ``token_ids``, each attending to all that the chain names.
        token_ids: The block's tokens.
        parent: Entry of the block before; None for a first block.
        root: The chain's root hash, which carries the salts.
    """

    block: Block
    token_ids: tuple[int, ...]
    parent: PrefixEntry | None
    root: bytes


class PrefixIndex:
    """Maps block hashes to indexed blocks; knows nothing of reference counts."""

    def __init__(self) -> None:
        self._entries: dict[bytes, PrefixEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[bytes, PrefixEntry]]:
        return iter(self._entries.items())

    def find(
        self,
        block_hash: bytes,
        token_ids: tuple[int, ...],
        parent: PrefixEntry | None,
        root: bytes,
    ) -> PrefixEntry | None:
        """The entry that holds exactly these tokens after exactly this chain, or None."""
        entry = self._entries.get(block_hash)
        if entry is None or entry.token_ids != token_ids or entry.parent is not parent:
            return None
        return entry if entry.root == root else None

    def publish(
        self,
        block: Block,
        block_hash: bytes,
        token_ids: tuple[int, ...],
        parent: PrefixEntry | None,
        root: bytes,
    ) -> tuple[PrefixEntry, Block | None]:
        """Index a full block whose K and V have been computed.

        Another block under the same hash gives way: it can only be a collision, or a block whose
        own chain has been evicted and which no look-up can reach any more.

        Returns:
            The new entry, and the block that gave way to it or None.
        """
        if block.block_hash is not None:
            self.remove(block)
        displaced = self._entries.get(block_hash)
        if displaced is not None:
            displaced.block.block_hash = None
        entry = PrefixEntry(block, token_ids, parent, root)
        self._entries[block_hash] = entry
        block.block_hash = block_hash
        return entry, displaced.block if displaced is not None else None

    def is_live(self, entry: PrefixEntry) -> bool:
        """Whether the entry is still indexed."""
        block_hash = entry.block.block_hash
        return block_hash is not None and self._entries.get(block_hash) is entry

    def cut_dead(self, chain: list[PrefixEntry]) -> None:
        """Shorten a chain to the entries before the first one that is no longer indexed."""
        for index, entry in enumerate(chain):
            if not self.is_live(entry):
                del chain[index:]
                return

    def remove(self, block: Block) -> None:
        """Forget an indexed block."""
        assert block.block_hash is not None
        entry = self._entries.pop(block.block_hash)
        assert entry.block is block
        block.block_hash = None
