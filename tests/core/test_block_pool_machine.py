"""The pool against a model that a child could check: three sets and one list in order of use."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedmlx.core.block import Block
from pagedmlx.core.block_pool import BlockPool
from pagedmlx.core.prefix import PrefixIndex, pack_tokens


class BlockPoolMachine(RuleBasedStateMachine):
    pool: BlockPool
    index: PrefixIndex

    def __init__(self) -> None:
        super().__init__()
        self.num_blocks = 0
        self.in_use: dict[int, int] = {}  # block id to reference count
        self.cached: list[int] = []  # least recently used first
        self.names: dict[int, bytes] = {}  # block id to the hash that it is indexed under
        self.blocks: dict[int, Block] = {}
        self.num_evictions = 0
        self.num_kept = 0
        self.created: set[int] = set()
        self.recent = 0

    @initialize(num_blocks=st.integers(1, 6), num_kept=st.integers(0, 6))
    def start(self, num_blocks: int, num_kept: int) -> None:
        self.num_blocks = num_blocks
        self.num_kept = min(num_kept, num_blocks)
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self.index, self.num_kept)

    @rule(count=st.integers(0, 6))
    def foresee(self, count: int) -> None:
        if self.pool.can_allocate(count):
            num_created = self.pool.num_created_after(count, count)
            for _ in range(count):
                self.allocate()
            assert self.pool.num_created_blocks == num_created

    @rule()
    def allocate(self) -> None:
        num_free = self.num_blocks - len(self.in_use) - len(self.cached)
        assert self.pool.can_allocate(num_free + len(self.cached))
        assert not self.pool.can_allocate(num_free + len(self.cached) + 1)
        if not self.pool.can_allocate(1):
            return
        block = self.pool.allocate()
        assert block.block_hash is None
        assert block.block_id not in self.in_use
        idle = self.created - self.in_use.keys() - set(self.cached)
        if idle:
            assert block.block_id in idle, "there was a free one"
        elif not self.cached or len(self.created) < self.num_kept:
            assert block.block_id == len(self.created), "content thrown away without need"
            self.created.add(block.block_id)
        else:
            assert block.block_id == self.cached.pop(0), "not the least recently used one"
            del self.names[block.block_id]
            self.num_evictions += 1
        self.in_use[block.block_id] = 1
        self.blocks[block.block_id] = block
        self.recent = max(self.recent, len(self.in_use))

    @precondition(lambda self: self.in_use or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from([*self.in_use, *self.cached]))
        self.pool.share([self.blocks[block_id]])
        if block_id in self.cached:
            self.cached.remove(block_id)
        self.in_use[block_id] = self.in_use.get(block_id, 0) + 1
        self.recent = max(self.recent, len(self.in_use))

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(list(self.in_use)))
        self.pool.free([self.blocks[block_id]])
        self.in_use[block_id] -= 1
        if not self.in_use[block_id]:
            del self.in_use[block_id]
            if block_id in self.names:
                self.cached.append(block_id)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data(), name=st.integers(0, 5))
    def publish(self, data: st.DataObject, name: int) -> None:
        block_id = data.draw(st.sampled_from(list(self.in_use)))
        block_hash, tokens = bytes([name]), pack_tokens([name])
        entry, displaced = self.index.publish(
            self.blocks[block_id], block_hash, tokens, None, b"root"
        )
        assert self.index.is_live(entry)
        assert self.index.find(tokens, None, b"root") is entry
        assert self.index.find(pack_tokens([name + 6]), None, b"root") is None
        assert self.index.find(tokens, None, b"other") is None
        assert self.index.find(tokens, entry, b"root") is None
        owner = next((i for i, known in self.names.items() if known == block_hash), None)
        if owner is not None and owner != block_id:
            assert displaced is self.blocks[owner]
            self.pool.forget(displaced)
            del self.names[owner]
            if owner in self.cached:
                self.cached.remove(owner)
        else:
            assert displaced is None
        self.names[block_id] = block_hash

    @rule()
    def reset_cache(self) -> None:
        assert self.pool.reset_cache() == len(self.cached)
        for block_id in self.cached:
            del self.names[block_id]
        self.cached.clear()

    @rule(num_kept=st.integers(0, 6))
    def give_back(self, num_kept: int) -> None:
        while len(self.created) > num_kept and len(self.created) - 1 not in self.in_use:
            last = len(self.created) - 1
            self.created.remove(last)
            del self.blocks[last]
            self.names.pop(last, None)
            if last in self.cached:
                self.cached.remove(last)
        assert self.pool.give_back(num_kept) == len(self.created)

    @rule()
    def look_at_recent_use(self) -> None:
        assert self.pool.recent_used_blocks == self.recent
        self.pool.recent_used_blocks = self.recent = len(self.in_use)

    @invariant()
    def pool_and_model_agree(self) -> None:
        if not self.num_blocks:
            return
        self.pool.check_integrity(self.in_use)
        assert self.pool.num_used_blocks == len(self.in_use)
        assert self.pool.num_created_blocks == len(self.created)
        assert self.pool.num_cached_blocks == len(self.cached)
        assert self.pool.num_free_blocks == self.num_blocks - len(self.in_use) - len(self.cached)
        assert self.pool.num_shared_blocks == sum(count > 1 for count in self.in_use.values())
        assert self.pool.num_evictions == self.num_evictions
        assert self.pool.peak_used_blocks >= len(self.in_use)
        assert {entry.block.block_id: key for key, entry in self.index} == self.names


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=100, stateful_step_count=40)
