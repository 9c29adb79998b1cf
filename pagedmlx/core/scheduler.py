"""Scheduler: decides which sequences run how many tokens in each step, and who waits.

Continuous batching as in Orca (Yu et al., 2022), preemption by recompute as in vLLM (Kwon et al.,
2023, section 4.5), chunked prefill as in Sarathi-Serve (Agrawal et al., 2024). There are no
phases: a sequence simply has more known tokens than computed ones. The policy, in full:

- Order is by priority, larger first, then by arrival.
- Running sequences go first: those with one token to compute, then prompts, in chunks, as far as
  the step's token budget reaches. Beside the former ``max_prompt_tokens`` limits them, and the
  first prompt shares what there is with the others, half and half. One that can't get its next
  block takes the blocks of the last one in order, which then waits with its tokens kept.
- Then waiting ones are admitted in order, as long as all their known tokens fit beside what
  running prompts still need and one more block for each running sequence that may come to need
  it. One that doesn't fit may be passed by later ones, but only ``max_overtakes`` times; then
  nothing passes it until it fits.
- A prompt, running or waiting, for which other prompts leave room for less than a quarter of a
  chunk waits for the next step, unless that is all it needs. Nothing is admitted past it then.
- A sequence whose next block is being computed by a step under way waits for that step and then
  shares it, so that a burst with one system prompt computes it once.
- A sequence that follows a grammar skips the step after each of its own: its token must be read
  before the next one can be chosen.
- The n outputs of a request fork from the first one's blocks once its prompt is there.
- Where log probabilities of the prompt are wanted, its chunks are so short that a step has at most
  ``max_prompt_logits`` rows of them, and nothing of it comes from the prefix cache.
- A request for an embedding ends when its prompt is computed. Nothing of that comes from the prefix
  cache unless the embedding is made of the last token alone.
"""

from __future__ import annotations

import bisect
from array import array

from pagedmlx.config import EngineConfig
from pagedmlx.core.counters import Counters
from pagedmlx.core.kv_manager import KVManager, SharedPrefix
from pagedmlx.core.request import Request
from pagedmlx.core.sequence import FinishReason, Sequence, SequenceStatus
from pagedmlx.core.snapshot import EngineSnapshot, take_snapshot
from pagedmlx.core.stats import EngineStats
from pagedmlx.core.step import ScheduledSequence, Step, StepResult
from pagedmlx.core.step_plan import StepPlan
from pagedmlx.errors import InvalidRequestError, PoolTooSmallError, QueueFullError

LONE_CHUNK = 512
"""Tokens that a prompt may take however slow they are, where no stream waits for it."""

LOOKAHEAD = 32
"""How many waiting sequences that can't start one step looks at before it gives up."""


class Scheduler:
    """Owns every request from ``add_request`` until its last output has ended.

    Each step that ``schedule`` gives is followed by its ``update``, in the same order, but not at
    once: step n + 1 may be scheduled while step n still runs. ``add_request``, ``finish`` and
    ``abort`` may come between any two calls. Nothing here is thread-safe: one thread owns the
    scheduler.

    Args:
        kv: The blocks.
        config: Limits and switches.
        max_prompt_logits: Rows of logits for log probabilities of prompts in one step.
        chunk_multiple: Chunks end at multiples of it where they can; a power of two.

    Attributes:
        waiting: In order.
        running: In order.
        max_prompt_tokens: Prompt tokens of a step beside sequences that decode; None is no limit.
            Beside none a prompt gets as many, or ``LONE_CHUNK``.
    """

    def __init__(
        self,
        kv: KVManager,
        config: EngineConfig,
        *,
        max_prompt_logits: int = 128,
        chunk_multiple: int = 1,
    ) -> None:
        self.kv = kv
        self._max_prompt_logits = max_prompt_logits
        self._chunk_multiple = chunk_multiple
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._config = config
        self._requests: dict[str, list[Sequence]] = {}
        self._next_seq_id = 0
        self._next_arrival = 0
        self._in_flight: dict[int, tuple[tuple[ScheduledSequence, int], ...]] = {}
        self._freed: list[int] = []
        self._waited: set[int] = set()
        self._counters = Counters()
        self.max_prompt_tokens: int | None = None

    # Requests come and go.

    def check_request(self, request: Request) -> None:
        """Refuse what could never run, however long it waited.

        Raises:
            PoolTooSmallError: Prompt and output don't fit the pool even alone.
            QueueFullError: ``max_num_waiting`` requests wait already.
            InvalidRequestError: The prompt is empty or the id is in use.
        """
        if not request.prompt_token_ids:
            raise InvalidRequestError("prompt", "is empty; at least one token is needed")
        if request.request_id in self._requests:
            raise InvalidRequestError("request_id", f"{request.request_id!r} is in use")
        # The last token is only ever read, so it needs no slot.
        needed = len(request.prompt_token_ids) + request.max_output_tokens - 1
        if needed > self.kv.capacity_tokens:
            raise PoolTooSmallError(
                "max_tokens",
                f"{len(request.prompt_token_ids)} prompt tokens and {request.max_output_tokens} "
                f"output tokens need {self.kv.num_blocks_for(needed)} blocks of "
                f"{self.kv.block_size}, the pool has "
                f"{self.kv.num_blocks_for(self.kv.capacity_tokens)}",
                hint="lower max_tokens, shorten the prompt or give the pool more memory",
            )
        limit = self._config.max_num_waiting
        if limit is not None:
            num_waiting = len({sequence.request.request_id for sequence in self.waiting})
            if num_waiting >= limit:
                raise QueueFullError(f"{num_waiting} requests wait already, at most {limit} may")

    def add_request(self, request: Request) -> tuple[Sequence, ...]:
        """Put a request's sequences into the waiting queue.

        Raises:
            PagedMLXError: As ``check_request`` says; nothing has changed then.
        """
        self.check_request(request)
        sequences: list[Sequence] = []
        for index in range(request.params.n):
            sequences.append(
                Sequence(
                    seq_id=self._next_seq_id,
                    request=request,
                    index=index,
                    token_ids=array("i", request.prompt_token_ids),
                    block_tables=self.kv.new_tables(),
                    arrival=self._next_arrival,
                )
            )
            self._next_seq_id += 1
        self._next_arrival += 1
        self._requests[request.request_id] = list(sequences)
        for sequence in sequences:
            bisect.insort(self.waiting, sequence, key=_order)
        self._counters.num_requests += 1
        return tuple(sequences)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and give back its blocks; ending it twice does nothing."""
        if sequence.is_finished:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._freed.append(sequence.seq_id)
        else:
            self.waiting.remove(sequence)
        self._waited.discard(sequence.seq_id)
        self.kv.release(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        siblings = self._requests[sequence.request.request_id]
        if all(sibling.is_finished for sibling in siblings):
            del self._requests[sequence.request.request_id]
            self._counters.num_finished_requests += 1

    def abort(self, request_id: str) -> tuple[Sequence, ...]:
        """End whatever of a request still lives; an unknown or ended one is no error.

        Returns:
            The sequences that were ended.
        """
        alive = tuple(s for s in self._requests.get(request_id, ()) if not s.is_finished)
        for sequence in alive:
            self.finish(sequence, FinishReason.ABORT)
        return alive

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    # One step.

    def schedule(self) -> Step | None:
        """Plan the next step; None when there is nothing to do before the next ``update``.

        A token that a step under way will sample can be computed already; the device knows it
        then. Whether it ends the sequence shows one step late, and what was computed is dropped.
        """
        if not self.has_unfinished:
            return None
        decodes, prompts = self._split_running()
        plan = StepPlan(
            self._config.max_num_batched_tokens,
            self._max_chunk,
            self._max_prompt_logits,
            self._chunk_multiple,
        )
        for sequence in decodes:
            self._schedule_running(plan, sequence)
        # A stream waits also for a step that it skips.
        if decodes and self.max_prompt_tokens is not None:
            self._share_prompt_tokens(plan, prompts, self.max_prompt_tokens)
        else:
            for sequence in prompts:
                self._schedule_running(plan, sequence)
            self._admit_waiting(plan)
        return self._close(plan)

    def update(self, result: StepResult) -> tuple[Sequence, ...]:
        """Take in what a step computed: publish blocks, append tokens, notice the ends.

        Returns:
            The sequences that got a token or their embedding, in the step's order; some may have
            finished by it.
        """
        grown: list[Sequence] = []
        for entry, num_preemptions in self._in_flight.pop(result.step_id):
            sequence = entry.sequence
            if sequence.is_finished:
                continue
            if sequence.num_preemptions == num_preemptions:
                end = entry.start + entry.num_tokens
                self.kv.end_pending(sequence, end)
                self.kv.publish(sequence, end)
            if entry.needs_logits:
                sequence.num_unread_tokens -= 1
                sequence.token_ids.append(result.sampled[sequence.seq_id])
                self._counters.num_output_tokens += 1
                grown.append(sequence)
                self._finish_if_done(sequence, is_whole=sequence.seq_id in result.ended)
            elif entry.completes_embedding:
                grown.append(sequence)
                self.finish(sequence, FinishReason.STOP)
        return tuple(grown)

    @property
    def _max_chunk(self) -> int:
        """Most tokens of a prompt in a step, which newcomers wait for also where no stream does."""
        if self.max_prompt_tokens is None:
            return self._config.max_chunk
        return min(self._config.max_chunk, max(LONE_CHUNK, self.max_prompt_tokens))

    def _split_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences in order: those with one token to compute, and those with more."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.running:
            (decodes if sequence.num_left <= 1 else prompts).append(sequence)
        return decodes, prompts

    def _share_prompt_tokens(self, plan: StepPlan, prompts: list[Sequence], limit: int) -> None:
        """Compute prompts beside streams that wait for them.

        The first one gets half and what the others leave. The other half goes to those that it
        brings to their end, so that no short prompt waits for a long one, to those that come, and
        then to the rest.
        """
        plan.limit_prompts(limit)
        first, rest = next(iter(prompts), None), sorted(prompts[1:], key=lambda each: each.num_left)
        with plan.half_kept_for(first):
            while rest and rest[0].num_left <= plan.prompt_room:
                self._schedule_running(plan, rest.pop(0))
            self._admit_waiting(plan)
            for sequence in rest:
                self._schedule_running(plan, sequence)
        if first is not None:
            self._schedule_running(plan, first)

    def _schedule_running(self, plan: StepPlan, sequence: Sequence) -> None:
        if sequence.status is not SequenceStatus.RUNNING:
            return  # preempted a moment ago
        if sequence.num_output_tokens + sequence.num_unread_tokens >= (
            sequence.request.max_output_tokens
        ):
            return  # its last token is on the way
        if sequence.must_be_read:
            return
        num_tokens = plan.num_tokens_for(sequence)
        if num_tokens < 1:
            return
        while (copies := self.kv.try_allocate(sequence, num_tokens)) is None:
            victim = self.running[-1]
            if victim is sequence and self._in_flight:
                return  # what is under way may end and free some
            self._preempt(plan, victim)
            if victim is sequence:
                return
        plan.enter(sequence, num_tokens, copies)

    def _admit_waiting(self, plan: StepPlan) -> None:
        if not self.waiting:
            return
        blocked: list[Sequence] = []
        # Each that runs keeps a block to grow into, else it would soon preempt who came last.
        keep = [0] * len(self.kv.pools)
        for sequence in self.running:
            _add(keep, self.kv.num_promised_blocks(sequence))
        num_deferred = 0
        for sequence in tuple(self.waiting):
            if plan.num_tokens_left < 1 or len(self.running) >= self._config.max_num_seqs:
                break
            if plan.num_prompt_tokens_left < 1:
                break
            if len(blocked) + num_deferred >= LOOKAHEAD:
                break
            if any(s.num_overtaken >= self._config.max_overtakes for s in blocked):
                break
            # Whatever it shares, it needs a block of its own. A step never both takes a sequence's
            # blocks and runs it, and all tokens of one that starts must be known.
            if (
                not self.kv.has_room(keep)
                or sequence.seq_id in plan.preempted
                or sequence.num_unread_tokens
            ):
                blocked.append(sequence)
                continue
            siblings = self._running_siblings(sequence)
            if siblings and not any(self._can_fork(plan, sibling) for sibling in siblings):
                continue  # the prompt that it will fork from is still being computed
            if sequence.lacks_prompt_rows:
                wants_logits = sequence.request.pooling is None
                prefix = self.kv.no_prefix()
                must_wait = wants_logits and plan.num_prompt_logits_left < 1
            else:
                prefix = self._find_shared(plan, sequence, siblings)
                must_wait = self.kv.is_pending(sequence, prefix)
            if must_wait:
                num_deferred += 1
                continue
            if not plan.is_worth(sequence.num_tokens - prefix.num_tokens):
                break
            if self.kv.num_blocks_short(sequence, prefix, keep) > 0:
                blocked.append(sequence)
                continue
            self._admit(plan, sequence, prefix)
            _add(keep, self.kv.num_promised_blocks(sequence))
            for passed in blocked:
                passed.num_overtaken += 1
                self._counters.num_overtakes += 1
        for sequence in blocked:
            if sequence.seq_id not in self._waited:
                self._waited.add(sequence.seq_id)
                self._counters.num_waits += 1
        self._counters.num_deferrals += num_deferred
        if blocked:
            self._counters.note_wait(self.kv)

    def _running_siblings(self, sequence: Sequence) -> list[Sequence]:
        return [
            sibling
            for sibling in self._requests[sequence.request.request_id]
            if sibling.status is SequenceStatus.RUNNING
        ]

    def _can_fork(self, plan: StepPlan, sibling: Sequence) -> bool:
        """Whether all of the prompt but its last token was computed before this step."""
        return plan.num_computed_before(sibling) >= sibling.num_prompt_tokens - 1

    def _find_shared(
        self, plan: StepPlan, sequence: Sequence, siblings: list[Sequence]
    ) -> SharedPrefix:
        prefix = self.kv.find_cached(sequence)
        if prefix.num_tokens < sequence.num_prompt_tokens - 1:
            for sibling in siblings:
                if self._can_fork(plan, sibling) and self.kv.can_fork(sequence, sibling):
                    return self.kv.find_forkable(sequence, sibling)
        return prefix

    def _admit(self, plan: StepPlan, sequence: Sequence, prefix: SharedPrefix) -> None:
        self.kv.admit(sequence, prefix)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = prefix.num_tokens
            self._counters.num_prompt_tokens += sequence.num_prompt_tokens
            self._counters.num_cached_tokens += prefix.num_tokens
        num_tokens = plan.num_tokens_for(sequence)
        copies = self.kv.try_allocate(sequence, num_tokens)
        assert copies is not None, "admitted without room"
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        bisect.insort(self.running, sequence, key=_order)
        plan.enter(sequence, num_tokens, copies)

    def _preempt(self, plan: StepPlan, sequence: Sequence) -> None:
        plan.preempt(sequence)
        self.running.remove(sequence)
        self.kv.release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._freed.append(sequence.seq_id)
        bisect.insort(self.waiting, sequence, key=_order)

    def _close(self, plan: StepPlan) -> Step | None:
        step = plan.close(self._counters.num_steps, tuple(self._freed))
        if step is None:
            assert self._in_flight, "nothing can run, yet something waits"
            return None
        self._freed.clear()
        self._in_flight[step.step_id] = tuple(
            (entry, entry.sequence.num_preemptions) for entry in step.scheduled
        )
        self._counters.note_step(step, self.kv.block_size)
        return step

    def _finish_if_done(self, sequence: Sequence, *, is_whole: bool) -> None:
        request = sequence.request
        # A grammar lets an end token be chosen before min_tokens only where nothing else is left.
        least = 1 if request.grammar is not None else max(1, request.params.min_tokens)
        may_stop = sequence.num_output_tokens >= least
        if is_whole or (may_stop and sequence.token_ids[-1] in request.stop_token_ids):
            self.finish(sequence, FinishReason.STOP)
        elif sequence.num_output_tokens >= request.max_output_tokens:
            self.finish(sequence, FinishReason.LENGTH)

    # Looking in.

    def num_blocks_ahead(self) -> tuple[int, ...]:
        """Blocks of each group that there will be when the prompts that can run are computed."""
        num_more = self._config.max_num_seqs - len(self.running)
        return self.kv.num_blocks_ahead([*self.running, *self.waiting[:num_more]])

    def stats(self) -> EngineStats:
        """A snapshot; bytes are the engine's to fill in."""
        return self._counters.snapshot(self.kv, self.running, self.waiting)

    def snapshot(self, stats: EngineStats) -> EngineSnapshot:
        """Every sequence and every block, beside these counts."""
        return take_snapshot(stats, self.kv, self.running, self.waiting)

    def check_integrity(self) -> None:
        """Assert every invariant of scheduler, tables and pools; cheap enough for every step."""
        assert self.waiting == sorted(self.waiting, key=_order), "waiting queue is out of order"
        assert self.running == sorted(self.running, key=_order), "running list is out of order"
        assert all(s.status is SequenceStatus.RUNNING for s in self.running)
        for sequence in self.waiting:
            assert sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            assert not any(len(table) for table in sequence.block_tables), "waits with blocks"
        alive = {s.seq_id for s in (*self.waiting, *self.running)}
        assert len(alive) == len(self.waiting) + len(self.running), "sequence is in two places"
        known = {
            s.seq_id
            for sequences in self._requests.values()
            for s in sequences
            if not s.is_finished
        }
        assert alive == known, "a live sequence is in no queue, or a queue holds a dead one"
        assert len(self.running) <= self._config.max_num_seqs
        assert self._waited <= alive
        self.kv.check_integrity(self.running)


def _add(counts: list[int], more: list[int]) -> None:
    for group, count in enumerate(more):
        counts[group] += count


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return (-sequence.request.priority, sequence.arrival, sequence.index)
