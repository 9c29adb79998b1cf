"""KVManager: which blocks each sequence holds, over all KV groups; the only user of the pools.

Every change is all or nothing: a method either does its whole work or leaves no trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pagedmlx.core.block import NO_BLOCK
from pagedmlx.core.block_pool import BlockPool
from pagedmlx.core.block_table import BlockTable
from pagedmlx.core.groups import KVGroup, Windows
from pagedmlx.core.prefix import HashFunction, hash_tokens
from pagedmlx.core.prefix_cache import PrefixCache, SharedPrefix
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.step import BlockCopy

MIN_PARTIAL_TOKENS = 4
"""Tokens that a partly equal block must save: copying it is a launch in every layer, which costs
about as much as two or three tokens more in a prefill."""


class KVManager:
    """Block tables, prefix sharing, copy on write and forks for all sequences.

    Args:
        groups: The model's KV groups. FULL keeps every block of a sequence; so does WINDOW where
            no group is FULL, else it gives back those that its window has passed.
        num_blocks: Blocks in each group's pool.
        block_size: Tokens in one block.
        enable_prefix_caching: Index full blocks and reuse them.
        salts: What cached blocks depend on besides their tokens: model, KV type, ...
        hash_function: How block hashes are made; replaced in tests.
        min_partial_tokens: Tokens that a partly equal cached block must save to be copied.
        num_kept_blocks: For each group, from how many blocks on cached ones are evicted before
            more memory is taken; None is all of them.
        slab_blocks: Blocks whose memory is taken and given back together.
        max_chunk: Most tokens of a sequence that one step computes.
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
        max_chunk: int = 512,
    ) -> None:
        assert len(groups) == len(num_blocks) >= 1
        self.groups = groups
        self.block_size = block_size
        self.num_copies = 0
        self._slab_blocks = slab_blocks
        self._windows = Windows(groups, block_size, max_chunk)
        self._cache = PrefixCache(
            self._windows,
            block_size,
            is_enabled=enable_prefix_caching,
            salts=salts,
            hash_function=hash_function,
            min_partial_tokens=min_partial_tokens,
        )
        self.pools = tuple(
            BlockPool(count, index, kept)
            for count, index, kept in zip(
                num_blocks, self._cache.indexes, num_kept_blocks or num_blocks, strict=True
            )
        )

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that fits when it has the pool to itself."""
        most = min(
            pool.num_blocks
            for group, pool in enumerate(self.pools)
            if self._windows.num_held(group, pool.num_blocks + 1) > pool.num_blocks
        )
        return most * self.block_size

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

    def num_promised_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks of each group to keep for a running one: for its tokens, and one more to grow."""
        longest = sequence.num_prompt_tokens + sequence.request.max_output_tokens - 1
        needed = self.num_blocks_for(sequence.num_tokens_ahead) + 1
        needed = min(needed, self.num_blocks_for(longest))
        return [
            max(0, self._windows.num_held(group, needed) - len(table.blocks))
            if needed > len(table)
            else 0
            for group, table in enumerate(sequence.block_tables)
        ]

    @property
    def num_created_blocks(self) -> tuple[int, ...]:
        """Blocks that each pool has handed out, with the ids below this number."""
        return tuple(pool.num_created_blocks for pool in self.pools)

    def num_blocks_ahead(self, sequences: Iterable[Sequence]) -> tuple[int, ...]:
        """Blocks that each pool will have handed out when all known tokens of these are computed.

        An estimate: each has one more to grow into, and a waiting one counts without what it could
        share with the last one before it that begins with the same block.

        Args:
            sequences: In order, running ones first. They count as far as they fit together.
        """
        num_blocks, num_held = 0, [0] * len(self.pools)
        alike: dict[tuple[int, ...], Sequence] = {}
        for sequence in sequences:
            promised = self.num_promised_blocks(sequence)
            num_new = promised[self._windows.anchor]
            beginning = tuple(sequence.token_ids[: self.block_size])
            other = alike.get(beginning)
            if other is not None and sequence.num_computed_tokens == 0:
                num_new -= self._num_shareable(sequence, other)
            alike[beginning] = sequence
            held = [
                count + min(num_new, most) for count, most in zip(num_held, promised, strict=True)
            ]
            if not all(map(BlockPool.can_allocate, self.pools, held)):
                break
            num_blocks, num_held = num_blocks + num_new, held
        # What a window has passed is taken again at once, unless it is cached.
        keeps_passed = self._cache.is_enabled
        return tuple(
            pool.num_created_after(num_blocks if keeps_passed else held, held)
            for pool, held in zip(self.pools, num_held, strict=True)
        )

    def _num_shareable(self, sequence: Sequence, other: Sequence) -> int:
        if sequence.request is other.request:  # a fork needs no cache
            return (sequence.num_prompt_tokens - 1) // self.block_size
        return self._cache.num_shareable(sequence, other)

    # Admission: what can be shared, and whether the rest fits.

    def find_cached(self, sequence: Sequence) -> SharedPrefix:
        """The longest cached prefix; the sequence's last token is never part of it.

        Where the next cached block begins like the sequence's next one, its beginning is part of
        the prefix too.
        """
        return self._cache.find(sequence)

    def no_prefix(self) -> SharedPrefix:
        """For a sequence that is to compute all of its tokens."""
        return self._cache.nothing()

    def is_pending(self, sequence: Sequence, prefix: SharedPrefix) -> bool:
        """Whether the first block after ``prefix`` is being computed by a step under way."""
        return self._cache.is_pending(sequence, prefix)

    def can_fork(self, sequence: Sequence, sibling: Sequence) -> bool:
        """Whether a sibling that has computed their prompt still holds what the other needs."""
        position = sequence.num_prompt_tokens - 1
        return all(
            sibling.block_tables[group].num_passed <= self._windows.first_needed(group, position)
            for group in self._windows.passing
        )

    def find_forkable(self, sequence: Sequence, sibling: Sequence) -> SharedPrefix:
        """The blocks of a sibling that hold all of their common prompt but its last token."""
        num_tokens = sequence.num_prompt_tokens - 1
        assert sibling.request is sequence.request
        assert sibling.num_computed_tokens >= num_tokens
        assert self.can_fork(sequence, sibling)
        count = self.num_blocks_for(num_tokens)
        full = num_tokens // self.block_size
        tables = sibling.block_tables
        return SharedPrefix(
            blocks=tuple(tuple(table.blocks[: count - table.num_passed]) for table in tables),
            num_passed=tuple(table.num_passed for table in tables),
            entries=tuple(tuple(table.entries[:full]) for table in tables),
            num_tokens=num_tokens,
        )

    def has_room(self, keep_available: list[int]) -> bool:
        """Whether every group has more blocks available than these."""
        return all(
            pool.num_available_blocks > keep
            for pool, keep in zip(self.pools, keep_available, strict=True)
        )

    def num_blocks_short(
        self, sequence: Sequence, prefix: SharedPrefix, keep_available: list[int] | None = None
    ) -> int:
        """How many blocks are missing to admit a sequence; 0 or less means that it fits.

        Args:
            sequence: Waiting; all its known tokens must fit.
            prefix: What it would share.
            keep_available: Blocks of each group that must stay available for others.

        Returns:
            That number in the group where it is largest.
        """
        is_partial = prefix.num_tokens % self.block_size > 0
        num_new = self.num_blocks_for(sequence.num_tokens) - self.num_blocks_for(prefix.num_tokens)
        short: list[int] = []
        for group, (pool, blocks) in enumerate(zip(self.pools, prefix.blocks, strict=True)):
            num_revived = sum(block.ref_count == 0 for block in blocks)
            # A last block that others hold must be copied; a cached one could be taken over.
            must_copy = is_partial and blocks[-1].ref_count > 0
            needed = self._windows.num_held(group, num_new + must_copy + num_revived)
            keep = keep_available[group] if keep_available is not None else 0
            short.append(needed + keep - pool.num_available_blocks)
        return max(short)

    def admit(self, sequence: Sequence, prefix: SharedPrefix) -> None:
        """Give a waiting sequence its shared blocks; allocates none."""
        assert not any(len(table) for table in sequence.block_tables)
        for group, table in enumerate(sequence.block_tables):
            table.share(prefix.blocks[group], prefix.num_passed[group])
            table.entries.extend(prefix.entries[group])
        sequence.num_computed_tokens = prefix.num_tokens

    # Running: room for the next tokens, publication, release.

    def try_allocate(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Make room to write the next ``num_tokens`` tokens, copying shared blocks first.

        A block that nobody else holds, but that is indexed, is copied too where there is room for
        it, so that it stays cached; else it is written over and forgotten. Blocks that no token
        from there on sees are given back first, in any case.

        Returns:
            The copies to schedule before the write, or None (and nothing else changed) when the
            pool has too few blocks.
        """
        start = sequence.num_computed_tokens
        end = start + num_tokens
        for group in self._windows.passing:
            table = sequence.block_tables[group]
            # A fork in this step begins one token earlier.
            first = self._windows.first_needed(group, start - 1)
            # What isn't indexed yet would be lost to others.
            table.pass_until(min(first, len(table.entries)) if self._cache.is_enabled else first)
        if self._may_write_at_once(sequence, start, end):
            self._cache.note_pending(sequence, start, end)
            return []
        num_blocks, first = self.num_blocks_for(end), start // self.block_size
        copied: list[list[int]] = []
        for table in sequence.block_tables:
            num_new = max(0, num_blocks - len(table))
            written = [(index, table[index]) for index in range(first, len(table))]
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
            for index in range(first, len(table)):
                if table[index].block_hash is not None:
                    # Its known content is about to change.
                    self._cache.indexes[group].remove(table[index])
            while len(table) < num_blocks:
                table.append()
        self.num_copies += len(copies)
        self._cache.note_pending(sequence, start, end)
        return copies

    def _may_write_at_once(self, sequence: Sequence, start: int, end: int) -> bool:
        """Whether all goes into last blocks that nobody else knows of: most steps of a stream."""
        last = start // self.block_size
        if (end - 1) // self.block_size > last:
            return False
        for table in sequence.block_tables:
            if len(table) != last + 1:
                return False
            block = table.blocks[-1]
            if block.ref_count > 1 or block.block_hash is not None:
                return False
        return True

    def publish(self, sequence: Sequence, end: int) -> None:
        """Index the sequence's full blocks within its first ``end`` tokens.

        Call it only after the step that computed them has completed.
        """
        self._cache.publish(sequence, end)

    def end_pending(self, sequence: Sequence, end: int | None = None) -> None:
        """Tokens below ``end`` are computed, or with None never will be: nobody waits for them."""
        self._cache.end_pending(sequence, end)

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Drop the tokens from ``num_tokens`` on; blocks left without any go back.

        Where a window has passed blocks that it would see again, all is to be computed anew. Call
        it between steps, never while one that computes the sequence is under way.
        """
        assert 1 <= num_tokens <= sequence.num_tokens
        num_computed = min(sequence.num_computed_tokens, num_tokens)
        num_full = num_tokens // self.block_size
        del sequence.token_ids[num_tokens:]
        del sequence.block_hashes[num_full:]
        del sequence.block_tokens[num_full:]
        if any(
            sequence.block_tables[group].num_passed
            > self._windows.first_needed(group, num_computed)
            for group in self._windows.passing
        ):
            self.release(sequence)
            num_computed = 0
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

    def give_back_unused(self) -> None:
        """Forget the last slabs of each pool, as far as they weren't needed since the last call."""
        for pool in self.pools:
            num_slabs = max(1, -(-pool.recent_used_blocks // self._slab_blocks))
            pool.give_back(num_slabs * self._slab_blocks)
            pool.recent_used_blocks = pool.num_used_blocks

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
                passed = [NO_BLOCK] * table.num_passed
                assert [*passed, *ids] == table.as_array().tolist(), "a table's ids are stale"
                counter.update(ids)
                covered = len(table) * self.block_size
                assert covered >= sequence.num_computed_tokens, "computed tokens have no block"
                assert covered - sequence.num_computed_tokens < self.block_size, "idle block held"
            for group, table in enumerate(sequence.block_tables):
                first = self._windows.first_needed(group, sequence.num_computed_tokens)
                assert table.num_passed <= first, "a block is passed that is still seen"
        for pool, prefix_index, counter in zip(
            self.pools, self._cache.indexes, counts, strict=True
        ):
            pool.check_integrity(counter)
            prefix_index.check_integrity()
