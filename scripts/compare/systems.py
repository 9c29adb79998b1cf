"""What holds K and V while a trace runs: the classic reservations, a padded batch, our own core.

Each system runs the same steps (a token budget, prompts in chunks, as many sequences at once as its
memory takes) and says after each how many slots hold what. A slot is room for one token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pagedmlx.config import EngineConfig
from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.core.kv_manager import KVManager
from pagedmlx.core.request import Request
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.scheduler import Scheduler
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.stats import EngineStats
from pagedmlx.core.step import Step, StepResult
from scripts.compare.allocators import Allocator, Region
from scripts.compare.traces import Job

LIMITS = EngineConfig(max_num_seqs=1024, prefill_chunk_size=512)
"""Token budget, chunk size and bounded overtaking, the same for all systems."""

LOOKAHEAD = 32
"""How many waiting requests that don't fit a step looks at, as in our scheduler."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Slots during one step. All that is held or missed is the sum of the last four.

    Attributes:
        num_tokens: Tokens that the step computes.
        num_running: Sequences that hold memory.
        num_waiting: Sequences that don't.
        is_short: Some of those wait because there is no room for them.
        logical: Tokens whose K and V are there, counted once for each sequence that reads them.
        needed: The slots that hold them; fewer than ``logical`` where they are shared.
        reserved: Held for tokens that will come.
        internal: Held and never filled.
        external: Held by nobody's wish (rounding), or free while somebody is short of memory.
        held: Slots that can't be given to anybody else now.
    """

    num_tokens: int
    num_running: int
    num_waiting: int
    is_short: bool
    logical: int
    needed: int
    reserved: int
    internal: int
    external: int
    held: int


class System(Protocol):
    """Takes jobs and runs them step by step."""

    def add(self, job_id: int, job: Job) -> None:
        """A request arrives."""
        ...

    def step(self) -> tuple[Usage, list[int]] | None:
        """Compute one step.

        Returns:
            What memory held during it and the jobs that ended with it; None without work.
        """
        ...


@dataclass(slots=True)
class _Candidate:
    """One sequence of a job in a system that shares nothing."""

    job_id: int
    job: Job
    num_computed: int = 0
    num_overtaken: int = 0
    region: Region | None = None

    @property
    def num_left(self) -> int:
        """Tokens that it could compute now."""
        return max(1, len(self.job.prompt) - self.num_computed)


@dataclass(slots=True)
class _Batch:
    """Continuous batching for systems that differ only in who gets memory."""

    waiting: list[_Candidate] = field(default_factory=list[_Candidate])
    running: list[_Candidate] = field(default_factory=list[_Candidate])
    num_alive: dict[int, int] = field(default_factory=dict[int, int])

    def add(self, job_id: int, job: Job) -> None:
        """All candidates of a job wait."""
        self.waiting.extend(_Candidate(job_id, job) for _ in range(job.n))
        self.num_alive[job_id] = job.n

    def admit(self, try_take: Callable[[_Candidate], bool], budget: int) -> bool:
        """Start what fits, in order, with overtaking bounded as in our scheduler.

        Returns:
            Whether somebody was left out for lack of memory.
        """
        blocked: list[_Candidate] = []
        for candidate in tuple(self.waiting):
            if budget < 1 or len(self.running) >= LIMITS.max_num_seqs:
                break
            if len(blocked) >= LOOKAHEAD:
                break
            if not try_take(candidate):
                blocked.append(candidate)
                if candidate.num_overtaken >= LIMITS.max_overtakes:
                    break  # nobody passes it any more
                continue
            self.waiting.remove(candidate)
            self.running.append(candidate)
            budget -= min(candidate.num_left, LIMITS.max_chunk)
            for passed in blocked:
                passed.num_overtaken += 1
        return bool(blocked)

    def compute(self) -> int:
        """Run what fits the token budget, single tokens first; returns how many tokens."""
        budget = LIMITS.max_num_batched_tokens
        for candidate in sorted(self.running, key=lambda each: each.num_left > 1):
            count = min(candidate.num_left, LIMITS.max_chunk, budget)
            candidate.num_computed += count
            budget -= count
        return LIMITS.max_num_batched_tokens - budget

    def budget_left(self) -> int:
        """Tokens of the budget that those who run leave."""
        wanted = sum(min(each.num_left, LIMITS.max_chunk) for each in self.running)
        return max(0, LIMITS.max_num_batched_tokens - wanted)

    def drop_ended(self) -> tuple[list[_Candidate], list[int]]:
        """Candidates that computed their last token, and jobs of which none is left."""
        ended = [each for each in self.running if each.num_computed >= each.job.num_slots]
        self.running = [each for each in self.running if each.num_computed < each.job.num_slots]
        for candidate in ended:
            self.num_alive[candidate.job_id] -= 1
        jobs = dict.fromkeys(each.job_id for each in ended)
        return ended, [job_id for job_id in jobs if not self.num_alive[job_id]]


class Reserving:
    """Reserves one contiguous region for a sequence's whole life when it starts.

    Args:
        allocator: Of the memory.
        reserve: Slots for a job's candidate.
    """

    def __init__(self, allocator: Allocator, reserve: Callable[[Job], int]) -> None:
        self._allocator = allocator
        self._reserve = reserve
        self._batch = _Batch()

    def add(self, job_id: int, job: Job) -> None:
        """A request arrives."""
        self._batch.add(job_id, job)

    def step(self) -> tuple[Usage, list[int]] | None:
        """Compute one step."""
        batch = self._batch
        if not batch.running and not batch.waiting:
            return None
        is_short = batch.admit(self._try_take, batch.budget_left())
        assert batch.running, "a reservation is larger than all memory"
        num_tokens = batch.compute()
        needed = sum(each.num_computed for each in batch.running)
        final = sum(each.job.num_slots for each in batch.running)
        asked = sum(self._reserve(each.job) for each in batch.running)
        granted = sum(each.region.granted for each in batch.running if each.region)
        free = self._allocator.num_free
        usage = Usage(
            num_tokens=num_tokens,
            num_running=len(batch.running),
            num_waiting=len(batch.waiting),
            is_short=is_short,
            logical=needed,
            needed=needed,
            reserved=final - needed,
            internal=asked - final,
            external=granted - asked + (free if is_short else 0),
            held=granted,
        )
        ended, jobs = batch.drop_ended()
        for candidate in ended:
            assert candidate.region is not None
            self._allocator.free(candidate.region)
        return usage, jobs

    def _try_take(self, candidate: _Candidate) -> bool:
        candidate.region = self._allocator.try_allocate(self._reserve(candidate.job))
        return candidate.region is not None


def reserve_maximum(max_len: int) -> Callable[[Job], int]:
    """All that a sequence could ever fill."""
    return lambda job: max_len


def reserve_power_of_two(max_len: int) -> Callable[[Job], int]:
    """The prompt, and the output's true length rounded up to a power of two."""
    return lambda job: min(max_len, len(job.prompt) + (1 << (job.num_outputs - 1).bit_length()))


def reserve_oracle(job: Job) -> int:
    """Exactly what the sequence will fill, as if its length were known."""
    return job.num_slots


class Padded:
    """One array for the whole batch, every row as long as the longest, grown 256 at a time.

    That is the layout of mlx-lm's BatchKVCache. It knows no budget itself, so here a request starts
    when the batch will stay within the budget to its end: the best that one could do for it.

    Args:
        budget_slots: All memory.
        growth: Slots by which rows grow.
    """

    def __init__(self, budget_slots: int, growth: int = 256) -> None:
        self._budget = budget_slots
        self._growth = growth
        self._batch = _Batch()

    def add(self, job_id: int, job: Job) -> None:
        """A request arrives."""
        self._batch.add(job_id, job)

    def step(self) -> tuple[Usage, list[int]] | None:
        """Compute one step."""
        batch = self._batch
        if not batch.running and not batch.waiting:
            return None
        is_short = batch.admit(self._fits, batch.budget_left())
        assert batch.running, "a request is larger than all memory"
        num_tokens = batch.compute()
        held = self._size([each.num_computed for each in batch.running])
        needed = sum(each.num_computed for each in batch.running)
        usage = Usage(
            num_tokens=num_tokens,
            num_running=len(batch.running),
            num_waiting=len(batch.waiting),
            is_short=is_short,
            logical=needed,
            needed=needed,
            reserved=0,
            internal=held - needed,
            external=self._budget - held if is_short else 0,
            held=held,
        )
        return usage, batch.drop_ended()[1]

    def _fits(self, candidate: _Candidate) -> bool:
        rows = [each.job.num_slots for each in (*self._batch.running, candidate)]
        return self._size(rows) <= self._budget

    def _size(self, rows: list[int]) -> int:
        return len(rows) * -(-max(rows) // self._growth) * self._growth


class Paged:
    """Our own scheduler and block tables, driven as the engine does; tokens are made up.

    Args:
        budget_slots: All memory.
        block_size: Tokens in one block; any, as no kernel has to know it here.
        limits: Token budget, chunk size and so on.
        enable_prefix_caching: Share equal prompt beginnings.
        depth: Steps that are scheduled ahead of the one whose tokens are read.
    """

    def __init__(
        self,
        budget_slots: int,
        block_size: int = 16,
        *,
        limits: EngineConfig = LIMITS,
        enable_prefix_caching: bool = True,
        depth: int = 0,
    ) -> None:
        group = KVGroup(KVGroupKind.FULL, (0,))
        self.kv = KVManager(
            (group,),
            (budget_slots // block_size,),
            block_size,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.scheduler = Scheduler(self.kv, limits)
        self._depth = depth
        self._num_short = 0
        self._under_way: deque[tuple[Step, Usage]] = deque()
        self._num_alive: dict[int, int] = {}

    def add(self, job_id: int, job: Job) -> None:
        """A request arrives."""
        params = SamplingParams(n=job.n, max_tokens=job.num_outputs, ignore_eos=True)
        self.scheduler.add_request(Request(str(job_id), job.prompt, params))
        self._num_alive[job_id] = job.n

    def step(self) -> tuple[Usage, list[int]] | None:
        """Compute one step."""
        # The engine's order: a step is read only when ``depth`` newer ones are under way.
        while True:
            step = self.scheduler.schedule()
            if step is not None:
                num_short, self._num_short = self._num_short, self.stats().num_waiting_steps
                usage = self._usage(step, self._num_short > num_short)
                self._under_way.append((step, usage))
            elif not self._under_way:
                return None
            if len(self._under_way) > (0 if step is None else self._depth):
                step, usage = self._under_way.popleft()
                return usage, self._update(step)

    def stats(self) -> EngineStats:
        """The core's own counts."""
        return self.scheduler.stats()

    def _update(self, step: Step) -> list[int]:
        sampled = {
            entry.sequence.seq_id: _made_up_token(entry.sequence)
            for entry in step.scheduled
            if entry.needs_logits
        }
        ended: list[int] = []
        for sequence in self.scheduler.update(StepResult(step.step_id, sampled)):
            if sequence.is_finished:
                job_id = int(sequence.request.request_id)
                self._num_alive[job_id] -= 1
                if not self._num_alive[job_id]:
                    ended.append(job_id)
        return ended

    def _usage(self, step: Step, is_short: bool) -> Usage:
        size, (pool,) = self.kv.block_size, self.kv.pools
        reserved = internal = logical = 0
        for sequence in self.scheduler.running:
            logical += sequence.num_computed_tokens
            # Nobody else holds the last block of one that runs: it was copied to be written.
            unfilled = len(sequence.block_tables[0]) * size - sequence.num_computed_tokens
            to_come = _num_slots(sequence) - sequence.num_computed_tokens
            reserved += min(unfilled, to_come)
            internal += max(0, unfilled - to_come)
        held = pool.num_used_blocks * size
        return Usage(
            num_tokens=step.num_tokens,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            is_short=is_short,
            logical=logical,
            needed=held - reserved - internal,
            reserved=reserved,
            internal=internal,
            external=pool.num_available_blocks * size if is_short else 0,
            held=held,
        )


def _num_slots(sequence: Sequence) -> int:
    return sequence.num_prompt_tokens + sequence.request.max_output_tokens - 1


def _made_up_token(sequence: Sequence) -> int:
    """Outputs that are all different, so that only prompts are ever shared."""
    return 1_000_000 + sequence.seq_id
