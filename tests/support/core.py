"""Drives the core without a model: a ghost memory instead of K and V, a hash instead of logits.

A ghost slot remembers the exact prefix whose K and V it would hold. Every step is checked against
it, so a block that is shared, copied, freed or written wrongly shows at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from pagedmlx.config import EngineConfig
from pagedmlx.core.batch import NO_BLOCK, BatchArrays, GroupArrays, build_batch
from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.core.kv_manager import MIN_PARTIAL_TOKENS, KVManager
from pagedmlx.core.pooling import Pooling
from pagedmlx.core.prefix import HashFunction, hash_tokens
from pagedmlx.core.request import Request
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.scheduler import Scheduler
from pagedmlx.core.sequence import FinishReason, Sequence
from pagedmlx.core.step import ScheduledSequence, Step, StepResult
from pagedmlx.core.structured import Grammar, GrammarMatcher

VOCABULARY = 4
STOP_TOKEN = 3

FULL = KVGroup(KVGroupKind.FULL, (0,))
WINDOW = KVGroup(KVGroupKind.WINDOW, (1,), window=3)


def constant_hash(parent: bytes, tokens: bytes) -> bytes:
    """The worst hash there is: everything collides."""
    return b"same"


def four_bit_hash(parent: bytes, tokens: bytes) -> bytes:
    """Sixteen values: collisions all the time, yet several entries live side by side."""
    return bytes([hash_tokens(parent, tokens)[0] & 15])


def make_kv(
    num_blocks: int = 8,
    block_size: int = 4,
    *,
    groups: tuple[KVGroup, ...] = (FULL,),
    window_blocks: int | None = None,
    prefix_caching: bool = True,
    salts: tuple[str, ...] = (),
    hash_function: HashFunction = hash_tokens,
    min_partial_tokens: int = MIN_PARTIAL_TOKENS,
    max_chunk: int = 512,
) -> KVManager:
    return KVManager(
        groups,
        (num_blocks, *[window_blocks or num_blocks] * (len(groups) - 1)),
        block_size,
        enable_prefix_caching=prefix_caching,
        salts=salts,
        hash_function=hash_function,
        min_partial_tokens=min_partial_tokens,
        max_chunk=max_chunk,
    )


def make_request(
    prompt: Iterable[int],
    max_tokens: int = 4,
    *,
    request_id: str = "r",
    n: int = 1,
    seed: int = 1,
    priority: int = 0,
    cache_salt: str = "",
    grammar: Grammar | None = None,
    min_tokens: int = 0,
    stop_token_ids: Iterable[int] = (),
    prompt_logprobs: int | None = None,
    pooling: Pooling | None = None,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(
            n=n, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=prompt_logprobs
        ),
        stop_token_ids=frozenset(stop_token_ids),
        seed=seed,
        priority=priority,
        cache_salt=cache_salt,
        grammar=grammar,
        pooling=pooling,
    )


class NoGrammar:
    """Nobody in the core looks into a grammar; that there is one is what counts."""

    def start(self) -> GrammarMatcher:
        raise AssertionError("the core follows no grammar")


# A model of four words. Its next token depends on every token before it, and on the seed and the
# index of the candidate; seed 0 is "greedy": all candidates are equal.


def next_token(request: Request, index: int, token_ids: Iterable[int]) -> int:
    salt = bytes([request.seed % 256, index]) if request.seed else b""
    return (zlib.crc32(salt + bytes(t % 256 for t in token_ids)) >> 7) % VOCABULARY


def ends_with_stop_string(output: list[int]) -> bool:
    """Stands for a stop string that only the engine can see: two tokens in a row."""
    return output[-2:] == [2, 1]


def solo_output(request: Request, index: int, *, stop_strings: bool = False) -> list[int]:
    """What a candidate must say, whatever else goes on."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    if request.pooling is not None:
        return output
    while len(output) < request.max_output_tokens:
        token = next_token(request, index, tokens)
        tokens.append(token)
        output.append(token)
        may_stop = len(output) >= request.params.min_tokens
        if may_stop and token in request.stop_token_ids:
            break
        if stop_strings and ends_with_stop_string(output):
            break
    return output


@dataclass
class GhostMemory:
    """Slots of every group, each with the prefix whose K and V it holds.

    Prefixes are interned: (salt, tokens) of any length is one number, and equal numbers are
    equal prefixes.
    """

    kv: KVManager
    slots: list[dict[int, int]] = field(init=False)
    # Tokens that only the device knows, by sequence.
    unread: dict[int, list[int]] = field(default_factory=dict)
    _interned: dict[tuple[object, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = [{} for _ in self.kv.groups]

    def prefixes(self, sequence: Sequence, count: int) -> list[int]:
        """The interned prefixes that end at positions 0 to ``count`` - 1."""
        found: list[int] = []
        parent: object = sequence.request.cache_salt
        tokens = [*sequence.token_ids, *self.unread.get(sequence.seq_id, ())]
        for token in tokens[:count]:
            parent = self._interned.setdefault((parent, token), len(self._interned))
            found.append(parent)
        return found

    def execute(self, step: Step) -> BatchArrays:
        """Do what a runner does, and check everything that it relies on."""
        batch = build_batch(step, self.kv.block_size)
        assert len(batch.groups) == len(self.kv.groups)
        for group in range(len(batch.groups)):
            self._copy(group, batch.groups[group])
            self._write(group, batch, step)
            self._read(group, batch, step)
        return batch

    def _copy(self, group: int, arrays: GroupArrays) -> None:
        size, slots = self.kv.block_size, self.slots[group]
        assert len(set(arrays.copy_dst.tolist())) == len(arrays.copy_dst)
        sources = [
            [slots.get(src * size + offset) for offset in range(size)]
            for src in arrays.copy_src.tolist()
        ]
        for dst, contents in zip(arrays.copy_dst.tolist(), sources, strict=True):
            for offset, content in enumerate(contents):
                slots.pop(dst * size + offset, None)
                if content is not None:
                    slots[dst * size + offset] = content

    def _write(self, group: int, batch: BatchArrays, step: Step) -> None:
        mapping = batch.groups[group].slot_mapping.tolist()
        assert len(set(mapping)) == len(mapping), "two rows of a launch write one slot"
        row = 0
        for entry in step.scheduled:
            prefixes = self.prefixes(entry.sequence, entry.start + entry.num_tokens)
            for position in range(entry.start, entry.start + entry.num_tokens):
                table = entry.sequence.block_tables[group]
                block = table[position // self.kv.block_size]
                assert mapping[row] // self.kv.block_size == block.block_id
                assert block.ref_count == 1, f"{block} is written while shared"
                assert block.block_hash is None, f"{block} is written while indexed"
                self.slots[group][mapping[row]] = prefixes[position]
                row += 1
        assert row == len(mapping)

    def _read(self, group: int, batch: BatchArrays, step: Step) -> None:
        size = self.kv.block_size
        for index, entry in enumerate(step.scheduled):
            length = entry.start + entry.num_tokens
            assert batch.context_lens[index] == length
            row = batch.groups[group].block_tables[index]
            num_blocks = -(-length // size)
            assert (row[num_blocks:] == NO_BLOCK).all()
            window = self.kv.groups[group].window
            first = max(0, entry.start - window + 1) if window else 0
            positions = np.arange(first, length)
            assert (row[positions // size] != NO_BLOCK).all(), "a block is passed that is seen"
            slots = row[positions // size].astype(np.int64) * size + positions % size
            held = [self.slots[group].get(slot) for slot in slots.tolist()]
            seen = self.prefixes(entry.sequence, length)[first:]
            assert held == seen, "K and V of another prefix"


@dataclass(repr=False)
class Driver:
    """Steps a scheduler the way an engine does: with ``depth`` steps scheduled ahead."""

    kv: KVManager
    config: EngineConfig
    stop_strings: bool = False
    depth: int = 0
    max_prompt_logits: int = 128
    chunk_multiple: int = 1
    # Positions of the prompt of which something has been told, by sequence.
    told: dict[int, range] = field(default_factory=dict)
    flying: list[tuple[Step, dict[int, int]]] = field(default_factory=list)
    scheduler: Scheduler = field(init=False)
    ghost: GhostMemory = field(init=False)
    steps: list[Step] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.kv,
            self.config,
            max_prompt_logits=self.max_prompt_logits,
            chunk_multiple=self.chunk_multiple,
        )
        self.ghost = GhostMemory(self.kv)

    def add(self, request: Request) -> tuple[Sequence, ...]:
        added = self.scheduler.add_request(request)
        self.sequences.extend(added)
        return added

    def step(self, between: Callable[[Step], object] = lambda step: None) -> Step | None:
        """Schedule and compute a step, call ``between``, update the oldest under way.

        Returns:
            The step that was updated; None when there is nothing to do.
        """
        running = list(self.scheduler.running)
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is not None:
            self.check_step(step, running)
            self.steps.append(step)
            self.flying.append((step, self._compute(step)))
        if not self.flying:
            return None
        between(self.flying[0][0])
        if len(self.flying) > (self.depth if step is not None else 0):
            self._update(*self.flying.pop(0))
        return self.steps[-1]

    def _compute(self, step: Step) -> dict[int, int]:
        self.ghost.unread = {}
        for _, tokens in self.flying:
            for seq_id, token in tokens.items():
                self.ghost.unread.setdefault(seq_id, []).append(token)
        batch = self.ghost.execute(step)
        unread = [entry.sequence for entry in step.scheduled if entry.is_unread]
        assert list(batch.unread_sequences) == unread
        self._check_pooled(step, batch)
        before = self.flying[-1][1] if self.flying else {}
        assert all(sequence.seq_id in before for sequence in unread)
        return {
            s.seq_id: next_token(
                s.request, s.index, [*s.token_ids, *self.ghost.unread.get(s.seq_id, ())]
            )
            for place, s in enumerate(batch.sample_sequences)
            if place not in batch.prompt_places
        }

    def _check_pooled(self, step: Step, batch: BatchArrays) -> None:
        """The rows that embeddings are made of are those of the step's positions."""
        expected = [
            (e.sequence, e.prompt_rows) for e in step.scheduled if e.sequence.request.pooling
        ]
        found = [
            (each.sequence, [int(batch.positions[row]) for row in each.rows])
            for each in batch.pooled
        ]
        assert found == [(sequence, list(rows)) for sequence, rows in expected if rows]
        for each in batch.pooled:
            assert not set(each.rows) & set(batch.sample_rows.tolist())

    def _update(self, step: Step, sampled: dict[int, int]) -> None:
        for sequence in self.scheduler.update(StepResult(step.step_id, sampled)):
            stopped = self.stop_strings and ends_with_stop_string(sequence.output_token_ids)
            if stopped and not sequence.is_finished:
                self.scheduler.finish(sequence, FinishReason.STOP)
        self.scheduler.check_integrity()

    def check_step(self, step: Step, running: list[Sequence]) -> None:
        """What holds for every step, given who was running before it."""
        config = self.config
        assert 1 <= step.num_tokens <= config.max_num_batched_tokens
        assert len(step.scheduled) <= config.max_num_seqs
        ids = [entry.sequence.seq_id for entry in step.scheduled]
        assert len(set(ids)) == len(ids)
        assert not set(ids) & set(step.freed), "a step names a freed sequence"
        assert not set(ids) & set(step.preempted)
        assert set(step.preempted) <= set(step.freed)
        single = [entry.num_tokens == 1 for entry in step.scheduled]
        assert single == sorted(single, reverse=True), "decode rows come first"
        limit = self.scheduler.max_prompt_tokens
        if limit is not None and any(not entry.num_prompt_tokens for entry in step.scheduled):
            # A step of prompts alone that ends in the last tokens of some may look like one, and
            # so may one in which somebody comes back who was preempted.
            entries = [entry for entry in step.scheduled if not entry.num_prompt_tokens]
            streams = [
                entry
                for entry in entries
                if entry.start >= entry.sequence.num_prompt_tokens and entry.sequence in running
            ]
            assert not streams or step.num_prompt_tokens <= limit, "streams wait too long"
        num_prompt_logits = sum(
            len(entry.prompt_rows) for entry in step.scheduled if not entry.sequence.request.pooling
        )
        assert num_prompt_logits <= self.max_prompt_logits
        for entry in step.scheduled:
            sequence = entry.sequence
            assert not sequence.is_finished
            assert not (entry.is_unread and sequence.request.grammar), "chosen without its text"
            assert 1 <= entry.num_tokens <= config.max_chunk
            end = entry.start + entry.num_tokens
            ahead = sequence.num_tokens_ahead - entry.needs_logits
            assert sequence.num_computed_tokens == end <= ahead
            assert entry.needs_logits == (end == ahead and not sequence.request.pooling)
            assert entry.is_unread == (end > sequence.num_tokens)
            self._check_prompt_rows(entry)
            for table in sequence.block_tables:
                assert len(table) == -(-end // self.kv.block_size)
        for sequence in self.scheduler.waiting:
            assert sequence.num_overtaken <= config.max_overtakes

    def _check_prompt_rows(self, entry: ScheduledSequence) -> None:
        """Each position that is wanted is told of once, in order, all before the first token."""
        sequence, request = entry.sequence, entry.sequence.request
        wanted = range(0)
        if request.pooling is not None:
            wanted = request.pooling.rows(sequence.num_prompt_tokens)
        elif sequence.index == 0 and request.params.prompt_logprobs is not None:
            wanted = range(sequence.num_prompt_tokens - 1)
        end = entry.start + entry.num_tokens
        told = self.told.get(sequence.seq_id, wanted[:0])
        if entry.prompt_rows:
            assert entry.prompt_rows.start == told.stop
            assert entry.start <= told.stop
            assert entry.prompt_rows.stop == min(wanted.stop, end)
            self.told[sequence.seq_id] = told = range(wanted.start, entry.prompt_rows.stop)
        assert told.stop >= min(wanted.stop, end)
        if end >= sequence.num_prompt_tokens:
            assert told == wanted

    def run(self, max_steps: int = 1000) -> int:
        """Step until nothing is left; fails when that takes more than ``max_steps``."""
        for count in range(max_steps):
            if self.step() is None:
                return count
        raise AssertionError(f"still not done after {max_steps} steps")

    def check_outputs(self) -> None:
        """Every output is the one of a solo run; an aborted one is a beginning of it."""
        for sequence in self.sequences:
            expected = solo_output(sequence.request, sequence.index, stop_strings=self.stop_strings)
            output = sequence.output_token_ids
            if sequence.request.pooling and sequence.finish_reason is not FinishReason.ABORT:
                assert sequence.finish_reason is FinishReason.STOP
                wanted = sequence.request.pooling.rows(sequence.num_prompt_tokens)
                assert self.told[sequence.seq_id] == wanted
            elif sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert output == expected
                at_limit = len(output) == sequence.request.max_output_tokens
                if output[-1] in sequence.request.stop_token_ids or not at_limit:
                    assert sequence.finish_reason is FinishReason.STOP
                else:
                    assert sequence.finish_reason is FinishReason.LENGTH
            else:
                assert output == expected[: len(output)]

    def check_empty(self) -> None:
        """Nothing is held, remembered or awaited when everything has ended."""
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert all(sequence.is_finished for sequence in self.sequences)
        for pool in self.kv.pools:
            assert pool.num_used_blocks == 0
            assert pool.num_free_blocks + pool.num_cached_blocks == pool.num_blocks
        leftovers = (
            self.scheduler._requests,
            self.scheduler._in_flight,
            self.scheduler._waited,
            self.kv._cache._pending,
            self.kv._cache._pending_of,
        )
        assert not any(leftovers), "bookkeeping of ended requests is left over"


def make_driver(
    num_blocks: int = 8,
    block_size: int = 4,
    *,
    groups: tuple[KVGroup, ...] = (FULL,),
    window_blocks: int | None = None,
    prefix_caching: bool = True,
    hash_function: HashFunction = hash_tokens,
    stop_strings: bool = False,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    prefill_chunk_size: int = 64,
    max_overtakes: int = 64,
    max_num_waiting: int | None = None,
    depth: int = 0,
    max_prompt_logits: int = 128,
    chunk_multiple: int = 1,
    min_partial_tokens: int = MIN_PARTIAL_TOKENS,
) -> Driver:
    kv = make_kv(
        num_blocks,
        block_size,
        groups=groups,
        window_blocks=window_blocks,
        prefix_caching=prefix_caching,
        hash_function=hash_function,
        min_partial_tokens=min_partial_tokens,
        max_chunk=prefill_chunk_size,
    )
    config = EngineConfig(
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_chunk_size=prefill_chunk_size,
        enable_prefix_caching=prefix_caching,
        max_overtakes=max_overtakes,
        max_num_waiting=max_num_waiting,
    )
    return Driver(
        kv,
        config,
        stop_strings=stop_strings,
        depth=depth,
        max_prompt_logits=max_prompt_logits,
        chunk_multiple=chunk_multiple,
    )
