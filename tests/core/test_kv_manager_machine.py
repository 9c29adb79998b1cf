"""The KV manager on its own against a ghost memory: sharing, forks, truncation, eviction."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedmlx.core.groups import KVGroup
from pagedmlx.core.kv_manager import KVManager
from pagedmlx.core.prefix import HashFunction
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.step import BlockCopy, ScheduledSequence, Step
from tests.support.core import GhostMemory, make_kv, make_request
from tests.support.strategies import (
    block_sizes,
    cache_salts,
    hash_functions,
    kv_groups,
    min_partial_tokens,
    prompts,
)


class KVManagerMachine(RuleBasedStateMachine):
    """Forks may live on with shared blocks for many steps here, unlike under the scheduler."""

    kv: KVManager
    ghost: GhostMemory

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Sequence] = []
        self.num_created = 0
        self.num_steps = 0

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=block_sizes,
        groups=kv_groups,
        hash_function=hash_functions,
        prefix_caching=st.sampled_from([True, True, True, False]),
        min_partial_tokens=min_partial_tokens,
        max_chunk=st.sampled_from([1, 2, 5, 512]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        groups: tuple[KVGroup, ...],
        hash_function: HashFunction,
        prefix_caching: bool,
        min_partial_tokens: int,
        max_chunk: int,
    ) -> None:
        self.kv = make_kv(
            num_blocks,
            block_size,
            groups=groups,
            hash_function=hash_function,
            prefix_caching=prefix_caching,
            min_partial_tokens=min_partial_tokens,
            max_chunk=max_chunk,
        )
        self.max_chunk = max_chunk
        self.ghost = GhostMemory(self.kv)

    @rule(prompt=prompts(), salt=cache_salts)
    def admit(self, prompt: tuple[int, ...], salt: str) -> None:
        sequence = self._create(prompt, salt)
        prefix = self.kv.find_cached(sequence)
        assert prefix.num_tokens < len(prompt)
        if self.kv.num_blocks_short(sequence, prefix) <= 0:
            self.kv.admit(sequence, prefix)
            self.live.append(sequence)
            self._check_held(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sibling = data.draw(st.sampled_from(self.live))
        if sibling.num_computed_tokens < sibling.num_prompt_tokens - 1:
            return
        sequence = self._create(sibling.request.prompt_token_ids, "")
        sequence.request = sibling.request
        if not self.kv.can_fork(sequence, sibling):
            # A window has passed what the fork would need, as after a preemption.
            assert any(table.num_passed for table in sibling.block_tables)
            return
        prefix = self.kv.find_forkable(sequence, sibling)
        assert prefix.num_tokens == sibling.num_prompt_tokens - 1
        if self.kv.num_blocks_short(sequence, prefix) <= 0:
            self.kv.admit(sequence, prefix)
            self.live.append(sequence)
            self._check_held(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=4, max_size=4))
    def step(self, data: st.DataObject, tokens: list[int]) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.live), unique_by=id, max_size=4))
        entries: list[ScheduledSequence] = []
        copies: list[BlockCopy] = []
        for sequence in chosen:
            start, left = sequence.num_computed_tokens, sequence.num_tokens
            num_tokens = data.draw(st.integers(1, min(left - start, self.max_chunk)))
            before = [pool.num_available_blocks for pool in self.kv.pools]
            ids = [table.as_array().tolist() for table in sequence.block_tables]
            made = self.kv.try_allocate(sequence, num_tokens)
            if made is None:
                # Only what the window has passed may be gone.
                for pool, count in zip(self.kv.pools, before, strict=True):
                    assert pool.num_available_blocks >= count
                for table, old in zip(sequence.block_tables, ids, strict=True):
                    assert table.as_array().tolist()[table.num_passed :] == old[table.num_passed :]
                assert self.kv.pools[0].num_available_blocks == before[0]
                continue
            copies += made
            sequence.num_computed_tokens = start + num_tokens
            entries.append(
                ScheduledSequence(sequence, start, num_tokens, start + num_tokens == left)
            )
        if not entries:
            return
        step = Step(self.num_steps, tuple(entries), tuple(copies), (), ())
        self.num_steps += 1
        self.ghost.execute(step)
        for entry, token in zip(entries, tokens, strict=False):
            self.kv.end_pending(entry.sequence, entry.start + entry.num_tokens)
            self.kv.publish(entry.sequence, entry.start + entry.num_tokens)
            if entry.needs_logits:
                entry.sequence.token_ids.append(token)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        num_tokens = data.draw(st.integers(sequence.num_prompt_tokens, sequence.num_tokens))
        if num_tokens <= sequence.num_computed_tokens and num_tokens > 1:
            # A rejected guess: its K and V are dropped with it, and another token is put there.
            self.kv.truncate(sequence, num_tokens)
            sequence.token_ids.append(data.draw(st.integers(0, 1)))
            self._check_held(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.kv.release(sequence)
        assert not any(len(table) for table in sequence.block_tables)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt_and_resume(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.kv.release(sequence)
        prefix = self.kv.find_cached(sequence)
        if self.kv.num_blocks_short(sequence, prefix) <= 0:
            self.kv.admit(sequence, prefix)
            self._check_held(sequence)
        else:
            self.live.remove(sequence)

    @rule()
    def reset_cache(self) -> None:
        num_cached = sum(pool.num_cached_blocks for pool in self.kv.pools)
        assert self.kv.reset_cache() == num_cached
        assert not any(pool.num_cached_blocks for pool in self.kv.pools)

    @rule()
    def give_back_unused(self) -> None:
        before = self.kv.num_created_blocks
        self.kv.give_back_unused()
        after = self.kv.num_created_blocks
        for pool, created, kept in zip(self.kv.pools, before, after, strict=True):
            assert pool.num_used_blocks <= kept <= created

    @rule(prompts=st.lists(prompts(), max_size=4), salt=cache_salts)
    def look_ahead(self, prompts: list[tuple[int, ...]], salt: str) -> None:
        """More sequences never need fewer blocks, and none need more than there may be."""
        sequences = [*self.live, *(self._create(prompt, salt) for prompt in prompts)]
        before = self.kv.num_created_blocks
        assert self.kv.num_blocks_ahead([]) == before
        for count in range(1, len(sequences) + 1):
            ahead = self.kv.num_blocks_ahead(sequences[:count])
            for pool, least, most in zip(self.kv.pools, before, ahead, strict=True):
                assert least <= most <= pool.num_blocks
            before = ahead

    @invariant()
    def everything_agrees(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_integrity(self.live)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for sequence in self.live:
            self.kv.release(sequence)
        self.kv.check_integrity([])
        assert all(pool.num_used_blocks == 0 for pool in self.kv.pools)
        assert not self.kv._cache._pending
        assert not self.kv._cache._pending_of

    def _create(self, prompt: tuple[int, ...], salt: str) -> Sequence:
        self.num_created += 1
        return Sequence(
            seq_id=self.num_created,
            request=make_request(prompt, cache_salt=salt),
            index=0,
            token_ids=list(prompt),
            block_tables=self.kv.new_tables(),
        )

    def _check_held(self, sequence: Sequence) -> None:
        """Slots that count as computed hold the sequence's own prefix, unless they were passed."""
        size, count = self.kv.block_size, sequence.num_computed_tokens
        for group, table in enumerate(sequence.block_tables):
            first = table.num_passed * size
            held = [
                self.ghost.slots[group].get(
                    table[position // size].block_id * size + position % size
                )
                for position in range(first, count)
            ]
            assert held == self.ghost.prefixes(sequence, count)[first:]


TestKVManager = KVManagerMachine.TestCase
TestKVManager.settings = settings(max_examples=150, stateful_step_count=40)
