"""PrefixCache: which blocks already hold a sequence's beginning, over all KV groups.

A group that keeps every token has a chain of entries: each proves its own block and, through the
one before, all that comes before it. Where windows pass, blocks of the middle are missing; there
an entry hangs on the one of the same place in the first group that keeps all, which proves as
much, and a hit needs only the blocks that its window still sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedmlx.core.block import Block
from pagedmlx.core.block_table import BlockTable
from pagedmlx.core.groups import Windows
from pagedmlx.core.prefix import (
    HashFunction,
    PrefixEntry,
    PrefixIndex,
    pack_blocks,
    pack_tokens,
    root_hash,
)
from pagedmlx.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Blocks that already hold K and V of a sequence's first tokens.

    Attributes:
        blocks: For each group the blocks, those left out that its window has passed. Of the last
            one only a beginning may count; it is copied before anything is written behind that.
        num_passed: For each group how many were left out, all at the beginning.
        entries: For each group the prefix entries of the full ones from the first one on, where
            known; None for those left out.
        num_tokens: Tokens that they stand for; always less than the sequence has.
    """

    blocks: tuple[tuple[Block, ...], ...]
    num_passed: tuple[int, ...]
    entries: tuple[tuple[PrefixEntry | None, ...], ...]
    num_tokens: int


class PrefixCache:
    """Hashes of sequences, the index of each group, and what steps under way will add.

    Args:
        windows: Which blocks each group still needs.
        block_size: Tokens in one block.
        is_enabled: Whether anything is ever indexed or found.
        salts: What cached blocks depend on besides their tokens.
        hash_function: How block hashes are made.
        min_partial_tokens: Tokens that a partly equal block must save to be copied.

    Attributes:
        indexes: One for each group.
        is_enabled: As given.
    """

    def __init__(
        self,
        windows: Windows,
        block_size: int,
        *,
        is_enabled: bool,
        salts: tuple[str, ...],
        hash_function: HashFunction,
        min_partial_tokens: int,
    ) -> None:
        self.indexes = tuple(PrefixIndex() for _ in windows.groups)
        self._windows = windows
        self._block_size = block_size
        self.is_enabled = is_enabled
        self._salts = salts
        self._hash = hash_function
        self._min_partial_tokens = min_partial_tokens
        # Blocks that steps under way will fill: hash to tokens, and the hashes of each sequence.
        self._pending: dict[bytes, bytes] = {}
        self._pending_of: dict[int, list[tuple[int, bytes]]] = {}

    # Finding.

    def find(self, sequence: Sequence) -> SharedPrefix:
        """The longest cached prefix; the sequence's last token is never part of it."""
        count = self._num_usable_blocks(sequence)
        root = self._root(sequence)
        self._pack(sequence, count)
        # Who waits looks again at each step: what was found is kept as far as it still stands.
        chains = sequence.cached_chains
        chains.extend([] for _ in range(len(self.indexes) - len(chains)))
        for group in self._windows.keeping:
            chain, index = chains[group], self.indexes[group]
            index.cut_dead(chain)
            del chain[count:]
            index.follow(chain, sequence.block_tokens[len(chain) : count], root)
            count = len(chain)  # chains of groups before may be longer now
        self._adopt_hashes(sequence, chains[self._windows.anchor])
        count, windowed = self._fit_windows(sequence, count, root)
        beginnings, num_alike = self._find_beginnings(sequence, count, root)
        blocks: list[tuple[Block, ...]] = []
        entries: list[tuple[PrefixEntry | None, ...]] = []
        num_passed: list[int] = []
        for group in range(len(chains)):
            chain = windowed.get(group, chains[group][:count])
            num_passed.append(count - len(chain))
            blocks.append(tuple(entry.block for entry in (*chain, *beginnings[group])))
            entries.append((*[None] * num_passed[-1], *chain))
        num_tokens = count * self._block_size + num_alike
        return SharedPrefix(tuple(blocks), tuple(num_passed), tuple(entries), num_tokens)

    def nothing(self) -> SharedPrefix:
        """For a sequence that is to compute all of its tokens."""
        empty = ((),) * len(self.indexes)
        return SharedPrefix(empty, (0,) * len(self.indexes), empty, num_tokens=0)

    def _find_beginnings(
        self, sequence: Sequence, count: int, root: bytes
    ) -> tuple[list[list[PrefixEntry]], int]:
        """For each group the block after ``count`` that begins most like the sequence's next one.

        Returns:
            No entry or one for each group, and in how many tokens all of them are alike.
        """
        nothing = [list[PrefixEntry]() for _ in self.indexes]
        start = count * self._block_size
        most = min(self._block_size, sequence.num_tokens - start) - 1
        if not self.is_enabled or most < self._min_partial_tokens:
            return nothing, 0
        tokens = pack_tokens(sequence.token_ids[start : start + most])
        found = [list[PrefixEntry]() for _ in self.indexes]
        num_alike = most
        for group in self._windows.keeping:
            parent = _last(sequence.cached_chains[group][:count])
            beginning = self.indexes[group].find_beginning(tokens, parent, root)
            if beginning is None:
                return nothing, 0
            found[group].append(beginning[0])
            num_alike = min(num_alike, beginning[1])
        if num_alike < self._min_partial_tokens:
            return nothing, 0
        (like,) = found[self._windows.anchor]
        for group in self._windows.passing:
            entry = self.indexes[group].find(like.tokens, like, root)
            if entry is None:
                return nothing, 0
            found[group].append(entry)
        return found, num_alike

    def _fit_windows(
        self, sequence: Sequence, count: int, root: bytes
    ) -> tuple[int, dict[int, list[PrefixEntry]]]:
        """The most blocks, up to ``count``, of which every window finds what it sees.

        Returns:
            That number, and for each group whose window passes the entries of those blocks.
        """
        found: dict[int, list[PrefixEntry]] = {}
        while len(found) < len(self._windows.passing):
            for group in self._windows.passing:
                fitting, found[group] = self._fit_window(sequence, group, count, root)
                if fitting < count:
                    count = fitting
                    found.clear()
                    break
        return count, found

    def _fit_window(
        self, sequence: Sequence, group: int, count: int, root: bytes
    ) -> tuple[int, list[PrefixEntry]]:
        chain = sequence.cached_chains[self._windows.anchor]
        known = sequence.cached_chains[group]
        while True:
            first = self._windows.first_needed(group, count * self._block_size)
            if len(known) == count - first and all(
                entry.parent is parent and self.indexes[group].is_live(entry)
                for entry, parent in zip(known, chain[first:count], strict=True)
            ):
                return count, known
            known = list[PrefixEntry]()
            for index in range(count - 1, first - 1, -1):
                tokens = sequence.block_tokens[index]
                entry = self.indexes[group].find(tokens, chain[index], root)
                if entry is None:
                    # Whatever ends behind this block needs it.
                    count = index
                    break
                known.append(entry)
            else:
                known.reverse()
                sequence.cached_chains[group] = known
                return count, known

    # Publishing.

    def publish(self, sequence: Sequence, end: int) -> None:
        """Index the sequence's full blocks within its first ``end`` tokens."""
        if not self.is_enabled:
            return
        num_full = end // self._block_size
        tables = sequence.block_tables
        for table in tables:
            if len(table.entries) < num_full:
                break
        else:
            return
        self._extend_hashes(sequence, num_full)
        root = self._root(sequence)
        for group in self._windows.keeping:
            # An entry may name another's block, evicted since; nothing is found behind a hole.
            self.indexes[group].cut_dead(tables[group].entries)
            for index in range(len(tables[group].entries), num_full):
                parent = _last(tables[group].entries)
                self._publish(sequence, group, tables[group], index, parent, root)
        for group in self._windows.passing:
            table, chain = tables[group], tables[self._windows.anchor].entries
            for index, (entry, parent) in enumerate(zip(table.entries, chain, strict=False)):
                if entry is not None and entry.parent is not parent:
                    del table.entries[index:]
                    break
            for index in range(len(table.entries), num_full):
                if index < table.num_passed:
                    table.entries.append(None)
                else:
                    self._publish(sequence, group, table, index, chain[index], root)

    def _publish(
        self,
        sequence: Sequence,
        group: int,
        table: BlockTable,
        index: int,
        parent: PrefixEntry | None,
        root: bytes,
    ) -> None:
        block_hash, tokens = sequence.block_hashes[index], sequence.block_tokens[index]
        entry = self.indexes[group].find(tokens, parent, root)
        if entry is None:
            entry, displaced = self.indexes[group].publish(
                table[index], block_hash, tokens, parent, root
            )
            if displaced is not None:
                table.pool.forget(displaced)
        table.entries.append(entry)

    # What steps under way will add.

    def note_pending(self, sequence: Sequence, start: int, end: int) -> None:
        """Tokens from ``start`` to ``end`` are about to be computed."""
        if not self.is_enabled:
            return
        # A block that ends with an unread token has no hash yet.
        first, last = start // self._block_size, min(end, sequence.num_tokens) // self._block_size
        if first >= last:
            return
        self._extend_hashes(sequence, last)
        blocks = list(enumerate(sequence.block_hashes[first:last], start=first))
        self._pending_of.setdefault(sequence.seq_id, []).extend(blocks)
        for index, block_hash in blocks:
            self._pending[block_hash] = sequence.block_tokens[index]

    def end_pending(self, sequence: Sequence, end: int | None = None) -> None:
        """Tokens below ``end`` are computed, or with None never will be: nobody waits for them."""
        blocks = self._pending_of.pop(sequence.seq_id, None)
        if blocks is None:
            return
        done = [block for block in blocks if end is None or block[0] < end // self._block_size]
        for _, block_hash in done:
            self._pending.pop(block_hash, None)
        if len(done) < len(blocks):
            self._pending_of[sequence.seq_id] = blocks[len(done) :]

    def is_pending(self, sequence: Sequence, prefix: SharedPrefix) -> bool:
        """Whether the first block after ``prefix`` is being computed by a step under way."""
        index = prefix.num_tokens // self._block_size
        if not self._pending or index >= self._num_usable_blocks(sequence):
            return False
        self._extend_hashes(sequence, index + 1)
        return self._pending.get(sequence.block_hashes[index]) == sequence.block_tokens[index]

    def num_shareable(self, sequence: Sequence, other: Sequence) -> int:
        """Full blocks that a sequence can have from another one, once that is computed."""
        if sequence.request.cache_salt != other.request.cache_salt or sequence.lacks_prompt_rows:
            return 0
        low, high = 0, min(self._num_usable_blocks(each) for each in (sequence, other))
        while low < high:
            middle = (low + high + 1) // 2
            span = slice(low * self._block_size, middle * self._block_size)
            if sequence.token_ids[span] == other.token_ids[span]:
                low = middle
            else:
                high = middle - 1
        return low

    def _num_usable_blocks(self, sequence: Sequence) -> int:
        if not self.is_enabled:
            return 0
        return (sequence.num_tokens - 1) // self._block_size

    def _root(self, sequence: Sequence) -> bytes:
        return root_hash(*self._salts, sequence.request.cache_salt)

    def _pack(self, sequence: Sequence, num_blocks: int) -> None:
        """Know the packed tokens of so many full blocks."""
        blocks, size = sequence.block_tokens, self._block_size
        if len(blocks) < num_blocks:
            tokens = sequence.token_ids[len(blocks) * size : num_blocks * size]
            blocks += pack_blocks(tokens, size)

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Know hashes and packed tokens of so many full blocks."""
        self._pack(sequence, num_blocks)
        hashes = sequence.block_hashes
        block_hash = hashes[-1] if hashes else self._root(sequence)
        for tokens in sequence.block_tokens[len(hashes) : num_blocks]:
            block_hash = self._hash(block_hash, tokens)
            hashes.append(block_hash)

    def _adopt_hashes(self, sequence: Sequence, chain: list[PrefixEntry]) -> None:
        """Know the hashes of the blocks that a chain of indexed entries holds."""
        hashes = sequence.block_hashes
        for entry in chain[len(hashes) :]:
            assert entry.block.block_hash is not None
            hashes.append(entry.block.block_hash)


def _last(chain: list[PrefixEntry] | list[PrefixEntry | None]) -> PrefixEntry | None:
    return chain[-1] if chain else None
