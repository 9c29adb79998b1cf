"""Sequence: one output of a request as the scheduler knows it: tokens, progress, blocks."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import StrEnum

from pagedmlx.core.block_table import BlockTable
from pagedmlx.core.prefix import PrefixEntry
from pagedmlx.core.request import Request


class SequenceStatus(StrEnum):
    """Where a sequence is; a preempted one waits like a new one, but keeps its tokens."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False, slots=True)
class Sequence:
    """One candidate output of a request.

    Attributes:
        seq_id: Unique within the scheduler.
        request: The request it belongs to.
        index: Which of the request's ``n`` outputs this is, from 0.
        token_ids: Prompt tokens, then output tokens; quickest to pack as an array of int32.
        num_computed_tokens: K and V of ``token_ids[:num_computed_tokens]`` are in the pool (or
            will be once the steps scheduled so far have run).
        num_unread_tokens: Tokens that steps under way sample for it; they will follow
            ``token_ids``, but only the device knows them yet.
        num_cached_tokens: How many of the prompt's tokens came from the prefix cache when it was
            first admitted (from a sibling's blocks for a fork).
        num_prompt_rows: Steps scheduled so far give what is wanted of the prompt's rows before
            this position.
        block_tables: One per KV group.
        arrival: Rises with each request; breaks ties of priority.
        status: Set by the scheduler only.
        finish_reason: None until finished.
        num_preemptions: How often it lost its blocks.
        num_overtaken: How many others passed it while it waited and didn't fit.
        block_hashes: Hashes of its full blocks as far as they were needed; the KV manager's.
        block_tokens: The packed tokens of its full blocks; likewise.
        cached_chains: What its last look-up in the prefix cache found, for each group; likewise.
    """

    seq_id: int
    request: Request
    index: int
    token_ids: MutableSequence[int]
    block_tables: tuple[BlockTable, ...]
    arrival: int = 0
    num_computed_tokens: int = 0
    num_unread_tokens: int = 0
    num_cached_tokens: int = 0
    num_prompt_rows: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    num_overtaken: int = 0
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    block_tokens: list[bytes] = field(default_factory=list[bytes])
    cached_chains: list[list[PrefixEntry]] = field(default_factory=list[list[PrefixEntry]])

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_tokens_ahead(self) -> int:
        """Tokens known or sampled by steps under way: as many as the next step can compute."""
        return len(self.token_ids) + self.num_unread_tokens

    @property
    def num_left(self) -> int:
        """Tokens that it has still to compute."""
        return self.num_tokens_ahead - self.num_computed_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens, as a copy."""
        return list(self.token_ids[len(self.request.prompt_token_ids) :])

    def prompt_rows(self, start: int, end: int) -> range:
        """Positions in [start, end) of the prompt of which something is still wanted.

        That is the hidden state for an embedding, or how likely the prompt's next token is, which
        the first of a request's outputs tells for all.
        """
        if self.request.pooling is not None:
            wanted = self.request.pooling.rows(self.num_prompt_tokens)
        elif self.index == 0 and self.request.params.prompt_logprobs is not None:
            wanted = range(self.num_prompt_tokens - 1)
        else:
            return range(0)
        first = max(start, wanted.start, self.num_prompt_rows)
        return range(first, max(first, min(end, wanted.stop)))

    @property
    def lacks_prompt_rows(self) -> bool:
        """Whether there are any before the last one, which is computed in any case.

        If so, nothing of the prompt can come from the prefix cache.
        """
        return bool(self.prompt_rows(0, self.num_prompt_tokens - 1))

    @property
    def must_be_read(self) -> bool:
        """Whether its next token can't be chosen before the host has read the last one."""
        return self.request.grammar is not None and self.num_unread_tokens > 0

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED
