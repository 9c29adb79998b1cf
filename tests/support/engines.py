"""Engines without a model: tokens come from a hash of the exact prefix, text from single bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from hashlib import blake2b
from operator import gt, le

import numpy as np

from pagedmlx.config import EngineConfig
from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.core.kv_manager import KVManager
from pagedmlx.core.pooling import EmbeddingSpec, Pooling
from pagedmlx.core.scheduler import Scheduler
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.step import Step, StepResult, TokenLogprobs
from pagedmlx.engine.engine import Engine
from pagedmlx.engine.inputs import EngineLimits
from pagedmlx.engine.outputs import Job, OutputEvent, RequestOutput
from pagedmlx.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_ids, byte_tokenizer

EOS = byte_tokenizer().token_to_id("</s>")
LETTERS = tuple(byte_ids(b"abcdefgh "))
VOCAB_SIZE = 268

Choose = Callable[[Sequence], int]
BeforeStep = Callable[[Step], object]


def hashed_letter(sequence: Sequence) -> int:
    """A letter that depends on all tokens so far; on seed and index too, unless greedy."""
    request = sequence.request
    chance = () if request.params.is_greedy else (request.seed, sequence.index)
    digest = blake2b(repr((sequence.token_ids, chance)).encode(), digest_size=4).digest()
    return LETTERS[int.from_bytes(digest, "little") % len(LETTERS)]


def spelled(text: str | bytes, *, then: int = EOS) -> Choose:
    """Every output spells ``text``, and then goes on with one token for ever."""
    ids = byte_ids(text.encode() if isinstance(text, str) else text)

    def choose(sequence: Sequence) -> int:
        position = sequence.num_output_tokens
        return ids[position] if position < len(ids) else then

    return choose


def fake_logprobs(token: int, num_top: int | None) -> TokenLogprobs:
    """The token is the likeliest one, then come the letters."""
    others = [(letter, -float(place)) for place, letter in enumerate(LETTERS, 2)]
    return TokenLogprobs(token, -1.0, 1, ((token, -1.0), *others)[: num_top or 0])


EMBEDDING = EmbeddingSpec(Pooling.MEAN, 4, is_normalized=False, is_matryoshka=True)


def hashed_hidden(token_ids: Iterable[int]) -> np.ndarray:
    """(4,) float32 that depend on all tokens up to a position: the "hidden state" there."""
    digest = blake2b(repr(list(token_ids)).encode(), digest_size=4).digest()
    return np.frombuffer(digest, np.uint8).astype(np.float32)


class FakeRunner:
    """Computes nothing: ``choose`` names the token of each sequence that samples."""

    depth = 0

    def __init__(self, choose: Choose = hashed_letter, before_step: BeforeStep | None = None):
        self.choose = choose
        self.before_step = before_step
        self.num_closes = 0
        self.shrunk: list[tuple[int, ...]] = []
        # Blocks of each group that there is room for; None is any number.
        self.room: tuple[int, ...] | None = None
        self.num_growths = 0
        self.scheduled: set[str] = set()
        self.under_way: list[Step] = []

    def dispatch(self, step: Step) -> None:
        assert len(self.under_way) <= self.depth
        self.under_way.append(step)
        if self.before_step is not None:
            self.before_step(step)
        self.scheduled |= {entry.sequence.request.request_id for entry in step.scheduled}

    def collect(self) -> StepResult:
        # The tokens before it have been read by now, so they need not be kept here.
        step = self.under_way.pop(0)
        sampling = [entry.sequence for entry in step.scheduled if entry.needs_logits]
        sampled = {each.seq_id: self.choose(each) for each in sampling}
        logprobs = {
            each.seq_id: fake_logprobs(sampled[each.seq_id], each.request.params.logprobs)
            for each in sampling
            if each.request.params.logprobs is not None
        }
        prompts = {
            entry.sequence.seq_id: tuple(
                fake_logprobs(
                    entry.sequence.token_ids[position + 1],
                    entry.sequence.request.params.prompt_logprobs,
                )
                for position in entry.prompt_rows
            )
            for entry in step.scheduled
            if entry.num_prompt_logits
        }
        pooled = {
            entry.sequence.seq_id: np.sum(
                [
                    hashed_hidden(entry.sequence.token_ids[: position + 1])
                    for position in entry.prompt_rows
                ],
                axis=0,
                dtype=np.float32,
            )
            for entry in step.scheduled
            if entry.prompt_rows and entry.sequence.request.pooling is not None
        }
        return StepResult(step.step_id, sampled, logprobs, prompts, pooled)

    def rest(self) -> None:
        assert not self.under_way

    @property
    def pool_bytes(self) -> int:
        return self.shrunk[-1][0] if self.shrunk else 0

    def has_room(self, num_blocks: tuple[int, ...]) -> bool:
        return self.room is None or all(map(le, num_blocks, self.room))

    def grow(self, num_blocks: tuple[int, ...], num_ahead: tuple[int, ...]) -> None:
        assert not self.has_room(num_blocks)
        assert all(map(le, num_blocks, num_ahead))
        self.room = num_ahead
        self.num_growths += 1

    def has_spare(self, num_blocks: tuple[int, ...]) -> bool:
        return self.room is not None and any(map(gt, self.room, num_blocks))

    def shrink(self, num_blocks: tuple[int, ...]) -> None:
        self.shrunk.append(num_blocks)
        if self.room is not None:
            self.room = tuple(map(min, self.room, num_blocks))

    def close(self) -> None:
        self.num_closes += 1


def make_engine(
    runner: FakeRunner | None = None,
    *,
    max_model_len: int = 512,
    tokenizer: Tokenizer | None = None,
    clock: Callable[[], float] = time.monotonic,
    embedding: EmbeddingSpec | None = None,
    chunk_multiple: int = 1,
    cheap_tokens: int | None = None,
    **settings: object,
) -> Engine:
    """An engine over a fake runner with blocks of four tokens, checked after every step."""
    small = {"block_size": 4, "num_blocks": 64, "prefill_chunk_size": 8, "check_integrity": True}
    config = EngineConfig(**{**small, **settings})  # type: ignore[arg-type]
    assert config.num_blocks is not None
    kv = KVManager(
        (KVGroup(KVGroupKind.FULL, (0,)),),
        (config.num_blocks,),
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    limits = EngineLimits(
        max_model_len=max_model_len,
        capacity_tokens=config.num_blocks * config.block_size,
        block_size=config.block_size,
        vocab_size=VOCAB_SIZE,
    )
    return Engine(
        config,
        Scheduler(kv, config, chunk_multiple=chunk_multiple),
        runner or FakeRunner(),
        tokenizer or byte_tokenizer(),
        limits,
        cheap_tokens=cheap_tokens or config.block_size,
        notes=("fake",),
        embedding=embedding,
        clock=clock,
    )


def run_jobs(engine: Engine, jobs: Iterable[Job]) -> list[RequestOutput]:
    """Add all jobs, step until all have ended, and return their outputs in order."""
    prepared = [engine.prepare(job) for job in jobs]
    collectors = {each.request_id: each.collector() for each in prepared}
    for each in prepared:
        engine.add_request(each)
    while engine.has_unfinished:
        for event in engine.step():
            collectors[event.request_id].add(event)
    assert all(collector.finished for collector in collectors.values())
    return [collector.output() for collector in collectors.values()]


def run_job(engine: Engine, job: Job) -> RequestOutput:
    return run_jobs(engine, [job])[0]


def events_of(engine: Engine) -> list[OutputEvent]:
    """Step until idle; all events in order."""
    events: list[OutputEvent] = []
    while engine.has_unfinished:
        events += engine.step()
    return events


def assert_idle(engine: Engine) -> None:
    """Nothing is left of any request, and every block is free or cached."""
    # A step may still be under way when the last request has ended; nobody gets anything of it.
    while engine.has_unfinished and not engine._scheduler.has_unfinished:
        assert engine.step() == []
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert engine._live == {}
    scheduler = engine._scheduler
    assert not scheduler._requests
    assert not scheduler._waited
    assert not scheduler._in_flight
    assert not scheduler.kv._cache._pending
    assert not scheduler.kv._cache._pending_of
