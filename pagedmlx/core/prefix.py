"""PrefixIndex: finds the block that already holds the K and V of a run of tokens.

Indexed blocks form a tree, as in SGLang's RadixAttention (Zheng et al., 2024, section 3): each is
found by its tokens among those that go on from the block before. So no look-up needs a hash, and no
collision can serve another prompt's K and V. Content hashes, chained block by block as in vLLM's
automatic prefix caching, name what is computed more than once.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, takewhile
from operator import attrgetter

import numpy as np

from pagedmlx.core.block import Block

HashFunction = Callable[[bytes, bytes], bytes]
"""Maps (parent's hash, the block's packed tokens) to the block's hash."""


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as int32, to be hashed and compared at once."""
    return array("i", token_ids).tobytes()


def pack_blocks(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The same for each of the blocks that the tokens fill."""
    packed = np.array(token_ids, np.int32)
    return packed.view(f"V{block_size * packed.itemsize}").tolist()


def hash_tokens(parent: bytes, tokens: bytes) -> bytes:
    """The default ``HashFunction``: 16 bytes of blake2b over the parent's hash and the tokens."""
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


@lru_cache(maxsize=256)
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
        block: Holds K and V of ``tokens``, each attending to all that the chain names.
        tokens: The block's tokens, packed.
        parent: Entry of the block before; None for a first block.
        root: The chain's root hash, which carries the salts.
    """

    block: Block
    tokens: bytes
    parent: PrefixEntry | None
    root: bytes


_tokens_of = attrgetter("tokens")


class PrefixIndex:
    """Indexed blocks by tokens and by hash; knows nothing of reference counts."""

    def __init__(self) -> None:
        self._entries: dict[bytes, PrefixEntry] = {}
        # The same entries: a long chain is compared with them at once.
        self._live: set[PrefixEntry] = set()
        # What goes on from each entry, or from each root, in the order of the packed tokens.
        self._next: dict[PrefixEntry | bytes, list[PrefixEntry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[bytes, PrefixEntry]]:
        return iter(self._entries.items())

    def find(self, tokens: bytes, parent: PrefixEntry | None, root: bytes) -> PrefixEntry | None:
        """The entry that holds exactly these tokens after exactly this chain, or None."""
        entries = self._next.get(parent or root, ())
        place = bisect_left(entries, tokens, key=_tokens_of)
        if place < len(entries) and entries[place].tokens == tokens:
            return entries[place]
        return None

    def follow(self, chain: list[PrefixEntry], blocks: list[bytes], root: bytes) -> None:
        """Lengthen a chain by the entries that go on from it, up to the first block not indexed.

        Args:
            chain: Entries that are indexed.
            blocks: Packed tokens of the blocks after it.
            root: The chain's root hash.
        """
        entry = chain[-1] if chain else None
        for tokens in blocks:
            entry = self.find(tokens, entry, root)
            if entry is None:
                return
            chain.append(entry)

    def find_beginning(
        self, tokens: bytes, parent: PrefixEntry | None, root: bytes
    ) -> tuple[PrefixEntry, int] | None:
        """The entry after this chain that begins most like these tokens, and for how many."""
        entries = self._next.get(parent or root)
        if entries is None:
            return None
        # In sorted order nothing is more alike than one of the two neighbours.
        place = bisect_left(entries, tokens, key=_tokens_of)
        around = entries[max(0, place - 1) : place + 1]
        lengths = [_num_alike(entry.tokens, tokens) for entry in around]
        longest = max(lengths)
        return (around[lengths.index(longest)], longest) if longest else None

    def publish(
        self,
        block: Block,
        block_hash: bytes,
        tokens: bytes,
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
            self.remove(displaced.block)
        entry = PrefixEntry(block, tokens, parent, root)
        self._entries[block_hash] = entry
        self._live.add(entry)
        entries = self._next.setdefault(parent or root, [])
        entries.insert(bisect_left(entries, tokens, key=_tokens_of), entry)
        block.block_hash = block_hash
        return entry, displaced.block if displaced is not None else None

    def is_live(self, entry: PrefixEntry) -> bool:
        """Whether the entry is still indexed."""
        return entry in self._live

    def cut_dead(self, chain: list[PrefixEntry] | list[PrefixEntry | None]) -> None:
        """Shorten a chain to the entries before the first one that is no longer indexed."""
        if not self._live.issuperset(chain):
            del chain[next(i for i, entry in enumerate(chain) if entry not in self._live) :]

    def remove(self, block: Block) -> None:
        """Forget an indexed block."""
        assert block.block_hash is not None
        entry = self._entries.pop(block.block_hash)
        assert entry.block is block
        self._live.remove(entry)
        block.block_hash = None
        key = entry.parent or entry.root
        entries = self._next[key]
        del entries[bisect_left(entries, entry.tokens, key=_tokens_of)]
        if not entries:
            del self._next[key]

    def check_integrity(self) -> None:
        """Assert that every entry is found by its beginning, and nothing else is."""
        found = [entry for entries in self._next.values() for entry in entries]
        assert len(found) == len(self._entries), "entries and beginnings differ in number"
        assert set(found) == set(self._entries.values()), "a beginning has no entry"
        assert set(found) == self._live, "an entry is forgotten in part"
        for key, entries in self._next.items():
            assert all(
                (entry.parent or entry.root) is key or entry.root == key for entry in entries
            )
            tokens = [entry.tokens for entry in entries]
            assert all(a < b for a, b in pairwise(tokens)), "beginnings are out of order"


def _num_alike(left: bytes, right: bytes) -> int:
    """Tokens at the beginning in which two packed runs agree."""
    pairs = zip(array("i", left), array("i", right), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
