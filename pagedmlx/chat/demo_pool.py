"""DemoPool: a pool of blocks that holds words, for the demo. No engine, no model.

It keeps the engine's rules on a small scale: full blocks are shared by content, a shared block is
copied before it is written, what is let go stays cached, and who doesn't fit waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagedmlx.core.snapshot import NOBODY, EngineSnapshot, PoolSnapshot, SequenceSnapshot
from pagedmlx.core.stats import EngineStats

_BLOCK_BYTES = 360 * 1024


@dataclass(slots=True, eq=False)
class DemoSequence:
    """One answer and its block table."""

    request_id: str
    index: int
    tokens: list[str]
    num_prompt_tokens: int
    num_final_tokens: int
    blocks: list[int] = field(default_factory=list[int])
    num_cached_tokens: int = 0
    is_running: bool = False


class DemoPool:
    """The blocks, and who holds them.

    Args:
        num_blocks: Blocks in the pool.
        block_size: Words in one block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks))
        self._cached: dict[int, tuple[str, ...]] = {}
        self._by_content: dict[tuple[str, ...], int] = {}
        self._sequences: list[DemoSequence] = []
        self._num_output_tokens = 0
        self._num_copies = 0
        self._num_steps = 0

    def add(self, sequences: Sequence[DemoSequence]) -> None:
        """Let the candidates of one question in, or let them wait."""
        self._sequences += sequences
        self.admit()

    def admit(self) -> None:
        """Start who fits, first come first served."""
        for first in [each for each in self._sequences if not each.is_running and not each.index]:
            group = [each for each in self._sequences if each.request_id == first.request_id]
            if self._num_missing(group) > 0:
                return
            self._start(group)

    def grow(self, sequence: DemoSequence, word: str) -> None:
        """Write one word; its block must belong to this sequence alone."""
        place = len(sequence.tokens) // self.block_size
        if place == len(sequence.blocks):
            sequence.blocks.append(self._take())
        elif self._refs[sequence.blocks[place]] > 1:
            self._refs[sequence.blocks[place]] -= 1
            sequence.blocks[place] = self._take()
            self._num_copies += 1
        sequence.tokens.append(word)
        if len(sequence.tokens) % self.block_size == 0:
            self._by_content.setdefault(tuple(sequence.tokens), sequence.blocks[place])
        self._num_output_tokens += 1
        self._num_steps += 1

    def remove(self, sequence: DemoSequence) -> None:
        """Let go of its blocks; full ones stay cached."""
        self._sequences.remove(sequence)
        contents = {block: content for content, block in self._by_content.items()}
        for block in reversed(sequence.blocks):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in contents:
                self._cached[block] = contents[block]
            else:
                self._free.insert(0, block)
        self.admit()

    def snapshot(self) -> EngineSnapshot:
        """As the engine would tell it."""
        seen = sorted(self._sequences, key=lambda each: not each.is_running)
        owners = np.full(self.num_blocks, NOBODY, np.int32)
        for place in range(len(seen) - 1, -1, -1):
            owners[seen[place].blocks] = place
        is_cached = np.zeros(self.num_blocks, np.bool_)
        is_cached[list(self._cached)] = True
        refs = np.array(self._refs, np.int32)
        num_used = int((refs > 0).sum())
        running = [each for each in seen if each.is_running]
        stats = EngineStats(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_used_blocks=num_used,
            num_cached_blocks=len(self._cached),
            num_free_blocks=self.num_blocks - num_used - len(self._cached),
            num_shared_blocks=int((refs > 1).sum()),
            num_running=len(running),
            num_waiting=len(seen) - len(running),
            num_steps=self._num_steps,
            num_copies=self._num_copies,
            num_output_tokens=self._num_output_tokens,
            block_bytes=_BLOCK_BYTES,
            pool_bytes=_BLOCK_BYTES * self.num_blocks,
        )
        sequences = tuple(self._sequence(each) for each in seen)
        return EngineSnapshot(stats, sequences, (PoolSnapshot(owners, refs, is_cached),))

    def _sequence(self, sequence: DemoSequence) -> SequenceSnapshot:
        group = [each for each in self._sequences if each.request_id == sequence.request_id]
        return SequenceSnapshot(
            request_id=sequence.request_id,
            index=sequence.index,
            status="running" if sequence.is_running else "waiting",
            priority=0,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_output_tokens=len(sequence.tokens) - sequence.num_prompt_tokens,
            num_computed_tokens=len(sequence.tokens) if sequence.is_running else 0,
            num_cached_tokens=sequence.num_cached_tokens,
            num_missing_blocks=0 if sequence.is_running else max(0, self._num_missing(group)),
            num_preemptions=0,
            block_ids=(np.array(sequence.blocks, np.int32),),
        )

    def _num_missing(self, group: Sequence[DemoSequence]) -> int:
        """Blocks that a question lacks to be answered to its end, as promised ones count too."""
        promised = sum(
            math.ceil(each.num_final_tokens / self.block_size) - len(each.blocks)
            for each in self._sequences
            if each.is_running
        )
        first = group[0]
        shared = len(self._hits(first.tokens)) + first.num_prompt_tokens // self.block_size * (
            len(group) - 1
        )
        wanted = sum(math.ceil(each.num_final_tokens / self.block_size) for each in group)
        return wanted - shared - (len(self._free) + len(self._cached) - promised)

    def _hits(self, tokens: Sequence[str]) -> list[int]:
        found: list[int] = []
        # The last word is always computed.
        for end in range(self.block_size, len(tokens), self.block_size):
            block = self._by_content.get(tuple(tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def _start(self, group: Sequence[DemoSequence]) -> None:
        first = group[0]
        hits = self._hits(first.tokens)
        first.blocks = list(hits)
        first.num_cached_tokens = len(hits) * self.block_size
        for block in hits:
            self._cached.pop(block, None)
            self._refs[block] += 1
        while len(first.blocks) * self.block_size < len(first.tokens):
            block = self._take()
            first.blocks.append(block)
            end = len(first.blocks) * self.block_size
            if end <= len(first.tokens):
                self._by_content.setdefault(tuple(first.tokens[:end]), block)
        for each in group:
            if each is not first:
                each.blocks = list(first.blocks)
                each.num_cached_tokens = each.num_prompt_tokens
                for block in each.blocks:
                    self._refs[block] += 1
            each.is_running = True

    def _take(self) -> int:
        if self._free:
            block = self._free.pop(0)
        else:
            block = next(iter(self._cached))
            del self._by_content[self._cached.pop(block)]
        self._refs[block] = 1
        return block
