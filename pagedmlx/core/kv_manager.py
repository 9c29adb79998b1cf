"""KVManager: which blocks each sequence holds, over all KV groups; the only user of the pools.

Every change is all or nothing: a method either does its whole work or leaves no trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pagedmlx.core.block import Block
from pagedmlx.core.block_pool import BlockPool
from pagedmlx.core.block_table import BlockTable
from pagedmlx.core.groups import KVGroup
from pagedmlx.core.prefix import HashFunction, PrefixEntry, PrefixIndex, hash_tokens, root_hash
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.step import BlockCopy

MIN_PARTIAL_TOKENS = 4
"""Tokens that a partly equal block must save: copying it is a launch in every layer, which costs
about as much as two or three tokens more in a prefill."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Blocks that already hold K and V of a sequence's first tokens.

    Attributes:
        blocks: For each group the blocks, the first one first. Of the last one only a beginning may
            count; it is copied before anything is written behind that.
        entries: For each group the prefix entries of the full ones among them, where known.
        num_tokens: Tokens that they hold; always less than the sequence has.
    """

    blocks: tuple[tuple[Block, ...], ...]
    entries: tuple[tuple[PrefixEntry, ...], ...]
    num_tokens: int


class KVManager:
    """Block tables, prefix sharing, copy on write and forks for all sequences.

    Args:
        groups: The model's KV groups, FULL or WINDOW; both keep every block of a sequence.
        num_blocks: Blocks in each group's pool.
        block_size: Tokens in one block.
        enable_prefix_caching: Index full blocks and reuse them.
        salts: What cached blocks depend on besides their tokens: model, KV type, ...
        hash_function: How block hashes are made; replaced in tests.
        min_partial_tokens: Tokens that a partly equal cached block must save to be copied.
        num_kept_blocks: For each group, from how many blocks on cached ones are evicted before
            more memory is taken; None is all of them.
        slab_blocks: Blocks whose memory is taken and given back together.
    """

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        num_blocks: tuple[int, ...],
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        salts: tuple[str, ...] = (),
        hash_function: HashFunction = hash_tokens,
        min_partial_tokens: int = MIN_PARTIAL_TOKENS,
        num_kept_blocks: tuple[int, ...] | None = None,
        slab_blocks: int = 1,
    ) -> None:
        assert len(groups) == len(num_blocks) >= 1
        self.groups = groups
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_copies = 0
        self._salts = salts
        self._hash = hash_function
        self._min_partial_tokens = min_partial_tokens
        self._slab_blocks = slab_blocks
        self._indexes = tuple(PrefixIndex() for _ in groups)
        self.pools = tuple(
            BlockPool(count, index, kept)
            for count, index, kept in zip(
                num_blocks, self._indexes, num_kept_blocks or num_blocks, strict=True
            )
        )
        # Blocks that steps under way will fill: hash to tokens, and the hashes of each sequence.
        self._pending: dict[bytes, tuple[int, ...]] = {}
        self._pending_of: dict[int, list[tuple[int, bytes]]] = {}

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that fits when it has the pool to itself."""
        return min(pool.num_blocks for pool in self.pools) * self.block_size

    @property
    def num_available_blocks(self) -> int:
        """Blocks that every group can still give: free or cached."""
        return min(pool.num_available_blocks for pool in self.pools)

    @property
    def can_give_back(self) -> bool:
        """Whether there is more than the first slab, and some of it is in no table."""
        return any(
            pool.num_created_blocks > max(pool.num_used_blocks, self._slab_blocks)
            for pool in self.pools
        )

    def new_tables(self) -> tuple[BlockTable, ...]:
        """Empty tables for a new sequence."""
        return tuple(BlockTable(pool) for pool in self.pools)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, sequence: Sequence) -> int:
        """Blocks that the sequence's tokens need beyond those that it holds."""
        needed = self.num_blocks_for(sequence.num_tokens_ahead)
        return max(0, needed - len(sequence.block_tables[0]))

    def num_promised_blocks(self, sequence: Sequence) -> int:
        """Blocks to keep for a running one: what its tokens need, and one more if it may grow."""
        num_held = len(sequence.block_tables[0].blocks)
        longest = sequence.num_prompt_tokens + sequence.request.max_output_tokens - 1
        needed = self.num_blocks_for(sequence.num_tokens_ahead) + 1
        return max(0, min(needed, self.num_blocks_for(longest)) - num_held)

    # Admission: what can be shared, and whether the rest fits.

    def find_cached(self, sequence: Sequence) -> SharedPrefix:
        """The longest cached prefix; the sequence's last token is never part of it.

        Where the next cached block begins like the sequence's next one, its beginning is part of
        the prefix too.
        """
        usable = self._num_usable_blocks(sequence)
        root = self._extend_hashes(sequence, usable)
        # Who waits looks again at each step: what was found is kept as far as it still stands.
        chains = sequence.cached_chains
        chains.extend([] for _ in range(len(self.groups) - len(chains)))
        for prefix_index, chain in zip(self._indexes, chains, strict=True):
            prefix_index.cut_dead(chain)
        known = min(usable, *map(len, chains))
        for chain in chains:
            del chain[known:]
        for index in range(known, usable):
            tokens = self._block_tokens(sequence, index)
            found = [
                prefix_index.find(
                    sequence.block_hashes[index], tokens, chain[-1] if chain else None, root
                )
                for prefix_index, chain in zip(self._indexes, chains, strict=True)
            ]
            if not all(found):
                break
            for chain, entry in zip(chains, found, strict=True):
                assert entry is not None
                chain.append(entry)
        beginnings, num_alike = self._find_beginnings(sequence, chains, root)
        return SharedPrefix(
            blocks=tuple(
                (*(entry.block for entry in chain), *beginning)
                for chain, beginning in zip(chains, beginnings, strict=True)
            ),
            entries=tuple(map(tuple, chains)),
            num_tokens=len(chains[0]) * self.block_size + num_alike,
        )

    def _find_beginnings(
        self, sequence: Sequence, chains: list[list[PrefixEntry]], root: bytes
    ) -> tuple[tuple[tuple[Block, ...], ...], int]:
        """For each group the block after its chain that begins most like the sequence's next one.

        Returns:
            No block or one for each group, and in how many tokens all of them are alike.
        """
        start = len(chains[0]) * self.block_size
        most = min(self.block_size, sequence.num_tokens - start) - 1
        if self.enable_prefix_caching and most >= self._min_partial_tokens:
            tokens = tuple(sequence.token_ids[start : start + most])
            found = [
                prefix_index.find_beginning(tokens, chain[-1] if chain else None, root)
                for prefix_index, chain in zip(self._indexes, chains, strict=True)
            ]
            num_alike = min(0 if each is None else each[1] for each in found)
            if num_alike >= self._min_partial_tokens:
                return tuple((each[0].block,) for each in found if each is not None), num_alike
        return ((),) * len(chains), 0

    def no_prefix(self) -> SharedPrefix:
        """For a sequence that is to compute all of its tokens."""
        nothing = ((),) * len(self.groups)
        return SharedPrefix(blocks=nothing, entries=nothing, num_tokens=0)

    def is_pending(self, sequence: Sequence, prefix: SharedPrefix) -> bool:
        """Whether the first block after ``prefix`` is being computed by a step under way."""
        index = prefix.num_tokens // self.block_size
        if index >= self._num_usable_blocks(sequence):
            return False
        tokens = self._pending.get(sequence.block_hashes[index])
        return tokens == self._block_tokens(sequence, index)

    def find_forkable(self, sequence: Sequence, sibling: Sequence) -> SharedPrefix:
        """The blocks of a sibling that hold all of their common prompt but its last token."""
        num_tokens = sequence.num_prompt_tokens - 1
        assert sibling.request is sequence.request
        assert sibling.num_computed_tokens >= num_tokens
        count = self.num_blocks_for(num_tokens)
        full = num_tokens // self.block_size
        return SharedPrefix(
            blocks=tuple(tuple(table.blocks[:count]) for table in sibling.block_tables),
            entries=tuple(tuple(table.entries[:full]) for table in sibling.block_tables),
            num_tokens=num_tokens,
        )

    def num_blocks_short(
        self, sequence: Sequence, prefix: SharedPrefix, keep_available: int
    ) -> int:
        """How many blocks are missing to admit a sequence; 0 or less means that it fits.

        Args:
            sequence: Waiting; all its known tokens must fit.
            prefix: What it would share.
            keep_available: Blocks that must stay available for others.
        """
        needed = self.num_blocks_for(sequence.num_tokens) - len(prefix.blocks[0])
        is_partial = prefix.num_tokens % self.block_size > 0
        short: list[int] = []
        for pool, blocks in zip(self.pools, prefix.blocks, strict=True):
            available = pool.num_available_blocks - sum(block.ref_count == 0 for block in blocks)
            # A last block that others hold must be copied; a cached one could be taken over.
            must_copy = is_partial and blocks[-1].ref_count > 0
            short.append(needed + must_copy + keep_available - available)
        return max(short)

    def admit(self, sequence: Sequence, prefix: SharedPrefix) -> None:
        """Give a waiting sequence its shared blocks; allocates none."""
        assert not any(len(table) for table in sequence.block_tables)
        for table, blocks, entries in zip(
            sequence.block_tables, prefix.blocks, prefix.entries, strict=True
        ):
            table.share(blocks)
            table.entries.extend(entries)
        sequence.num_computed_tokens = prefix.num_tokens

    # Running: room for the next tokens, publication, release.

    def try_allocate(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Make room to write the next ``num_tokens`` tokens, copying shared blocks first.

        A block that nobody else holds, but that is indexed, is copied too where there is room for
        it, so that it stays cached; else it is written over and forgotten.

        Returns:
            The copies to schedule before the write, or None (and nothing changed) when the pool
            has too few blocks.
        """
        start = sequence.num_computed_tokens
        end = start + num_tokens
        if self._may_write_at_once(sequence, start, end):
            self._note_pending(sequence, start, end)
            return []
        num_blocks, first = self.num_blocks_for(end), start // self.block_size
        copied: list[list[int]] = []
        for table in sequence.block_tables:
            num_new = max(0, num_blocks - len(table))
            written = [(index, table.blocks[index]) for index in range(first, len(table))]
            shared = [index for index, block in written if block.ref_count > 1]
            known = [i for i, block in written if block.ref_count > 1 or block.block_hash]
            if not table.pool.can_allocate(len(shared) + num_new):
                return None
            copied.append(known if table.pool.can_allocate(len(known) + num_new) else shared)
        copies: list[BlockCopy] = []
        for group, (table, indexes) in enumerate(zip(sequence.block_tables, copied, strict=True)):
            for index in indexes:
                old, new = table.replace(index)
                copies.append(BlockCopy(group, old.block_id, new.block_id))
            for block in table.blocks[first:]:
                if block.block_hash is not None:
                    self._indexes[group].remove(block)  # its known content is about to change
            while len(table) < num_blocks:
                table.append()
        self.num_copies += len(copies)
        self._note_pending(sequence, start, end)
        return copies

    def _may_write_at_once(self, sequence: Sequence, start: int, end: int) -> bool:
        """Whether all goes into last blocks that nobody else knows of: most steps of a stream."""
        last = start // self.block_size
        if (end - 1) // self.block_size > last:
            return False
        for table in sequence.block_tables:
            if len(table.blocks) != last + 1:
                return False
            block = table.blocks[last]
            if block.ref_count > 1 or block.block_hash is not None:
                return False
        return True

    def publish(self, sequence: Sequence, end: int) -> None:
        """Index the sequence's full blocks within its first ``end`` tokens.

        Call it only after the step that computed them has completed.
        """
        if not self.enable_prefix_caching:
            return
        num_full = end // self.block_size
        for table in sequence.block_tables:
            if len(table.entries) < num_full:
                break
        else:
            return
        root = self._extend_hashes(sequence, num_full)
        for table, prefix_index in zip(sequence.block_tables, self._indexes, strict=True):
            chain = table.entries
            # An entry may name another's block, evicted since; nothing is found behind a hole.
            prefix_index.cut_dead(chain)
            for index in range(len(chain), num_full):
                parent = chain[-1] if chain else None
                tokens = self._block_tokens(sequence, index)
                block_hash = sequence.block_hashes[index]
                entry = prefix_index.find(block_hash, tokens, parent, root)
                if entry is None:
                    entry, displaced = prefix_index.publish(
                        table.blocks[index], block_hash, tokens, parent, root
                    )
                    if displaced is not None:
                        table.pool.forget(displaced)
                chain.append(entry)

    def end_pending(self, sequence: Sequence, end: int | None = None) -> None:
        """Tokens below ``end`` are computed, or with None never will be: nobody waits for them."""
        blocks = self._pending_of.pop(sequence.seq_id, None)
        if blocks is None:
            return
        done = [block for block in blocks if end is None or block[0] < end // self.block_size]
        for _, block_hash in done:
            self._pending.pop(block_hash, None)
        if len(done) < len(blocks):
            self._pending_of[sequence.seq_id] = blocks[len(done) :]

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Drop the tokens from ``num_tokens`` on; blocks left without any go back.

        Call it between steps, never while one that computes the sequence is under way.
        """
        assert 1 <= num_tokens <= sequence.num_tokens
        num_computed = min(sequence.num_computed_tokens, num_tokens)
        num_full = num_tokens // self.block_size
        del sequence.token_ids[num_tokens:]
        del sequence.block_hashes[num_full:]
        sequence.num_computed_tokens = num_computed
        for chain in sequence.cached_chains:
            del chain[num_full:]
        for table in sequence.block_tables:
            table.truncate(self.num_blocks_for(num_computed))
            del table.entries[num_full:]

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence; what is indexed stays cached."""
        self.end_pending(sequence)
        for table in sequence.block_tables:
            table.release()
        sequence.num_computed_tokens = 0

    def give_back_unused(self) -> tuple[int, ...]:
        """Forget the last slabs of each pool, as far as they weren't needed since the last call.

        Returns:
            Blocks that are left, for each group.
        """
        kept: list[int] = []
        for pool in self.pools:
            num_slabs = max(1, -(-pool.recent_used_blocks // self._slab_blocks))
            kept.append(pool.give_back(num_slabs * self._slab_blocks))
            pool.recent_used_blocks = pool.num_used_blocks
        return tuple(kept)

    def reset_cache(self) -> int:
        """Forget all cached blocks; blocks in use stay indexed. Returns how many were dropped."""
        return sum(pool.reset_cache() for pool in self.pools)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that pools, tables and indexes agree; ``sequences`` are all that hold blocks."""
        counts: list[Counter[int]] = [Counter() for _ in self.groups]
        for sequence in sequences:
            for table, counter in zip(sequence.block_tables, counts, strict=True):
                ids = [block.block_id for block in table.blocks]
                assert len(set(ids)) == len(ids), f"sequence {sequence.seq_id} holds a block twice"
                assert ids == table.as_array().tolist(), "a table's ids are stale"
                counter.update(ids)
                covered = len(table) * self.block_size
                assert covered >= sequence.num_computed_tokens, "computed tokens have no block"
                assert covered - sequence.num_computed_tokens < self.block_size, "idle block held"
        for pool, prefix_index, counter in zip(self.pools, self._indexes, counts, strict=True):
            pool.check_integrity(counter)
            prefix_index.check_integrity()

    def _note_pending(self, sequence: Sequence, start: int, end: int) -> None:
        if not self.enable_prefix_caching:
            return
        # A block that ends with an unread token has no hash yet.
        first, last = start // self.block_size, min(end, sequence.num_tokens) // self.block_size
        if first >= last:
            return
        self._extend_hashes(sequence, last)
        blocks = list(enumerate(sequence.block_hashes[first:last], start=first))
        self._pending_of.setdefault(sequence.seq_id, []).extend(blocks)
        for index, block_hash in blocks:
            self._pending[block_hash] = self._block_tokens(sequence, index)

    def _num_usable_blocks(self, sequence: Sequence) -> int:
        if not self.enable_prefix_caching:
            return 0
        return (sequence.num_tokens - 1) // self.block_size

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> bytes:
        if sequence.root_hash is None:
            sequence.root_hash = root_hash(*self._salts, sequence.request.cache_salt)
        hashes = sequence.block_hashes
        for index in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else sequence.root_hash
            hashes.append(self._hash(parent, self._block_tokens(sequence, index)))
        return sequence.root_hash

    def _block_tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        start = index * self.block_size
        return tuple(sequence.token_ids[start : start + self.block_size])
