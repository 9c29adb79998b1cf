"""StepPlan: a step in the making, and what it still has room for."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from pagedmlx.core.sequence import Sequence
from pagedmlx.core.step import BlockCopy, ScheduledSequence, Step

_LEAST_SHARE = 4
"""Beside another prompt one waits for the next step rather than have room for less than 1/4 of a
chunk. (It may get less than there is room for, so that its chunk ends at a round position.)"""


class StepPlan:
    """Collects what one step runs, within its limits.

    Args:
        num_tokens: The step's token budget.
        chunk_size: Most tokens of one sequence.
        num_prompt_logits: Rows of logits for log probabilities of prompts.
        chunk_multiple: Where a chunk that isn't a prompt's last should end; a power of two.

    Attributes:
        num_tokens_left: What is left of the budget.
        num_prompt_tokens_left: What of it may go to sequences with more than one token to compute.
        num_prompt_logits_left: Likewise of the rows.
        preempted: Ids of the sequences that lost their blocks in this step.
    """

    def __init__(
        self, num_tokens: int, chunk_size: int, num_prompt_logits: int, chunk_multiple: int = 1
    ) -> None:
        self.num_tokens_left = num_tokens
        self.num_prompt_tokens_left = num_tokens
        self.num_prompt_logits_left = num_prompt_logits
        self.preempted: list[int] = []
        self._chunk_size = chunk_size
        self._chunk_multiple = chunk_multiple
        self._entries: dict[int, ScheduledSequence] = {}
        self._copies: dict[int, list[BlockCopy]] = {}

    def limit_prompts(self, num_tokens: int) -> None:
        """Have prompts compute no more than this in the step."""
        self.num_prompt_tokens_left = min(num_tokens, self.num_tokens_left)
        self._chunk_size = min(self._chunk_size, self.num_prompt_tokens_left)

    def num_tokens_for(self, sequence: Sequence) -> int:
        """How many of a sequence's next tokens the step can compute."""
        start = sequence.num_computed_tokens
        left = sequence.num_left
        if left <= 1:
            return min(left, self.num_tokens_left)
        if not self.is_worth(left):
            return 0
        num_tokens = min(left, self.prompt_room)
        if num_tokens < left:
            num_tokens = aligned(start, num_tokens, self._chunk_multiple)
        if sequence.request.pooling is not None:
            return num_tokens
        rows = sequence.prompt_rows(start, start + num_tokens)
        if len(rows) > self.num_prompt_logits_left:
            return rows.start + self.num_prompt_logits_left - start
        return num_tokens

    def is_worth(self, num_left: int) -> bool:
        """Whether to compute something of a prompt that has so many tokens left.

        Each piece has its price, so what others have left over is no start of a long one.
        """
        room = self.prompt_room
        if num_left <= room or room >= self._chunk_size // _LEAST_SHARE:
            return room > 0
        return room > 0 and not any(entry.num_prompt_tokens for entry in self._entries.values())

    @contextmanager
    def half_kept_for(self, sequence: Sequence | None) -> Generator[None]:
        """Keep half of what there is for prompts from all that enter meanwhile.

        Of tokens no more are kept than the sequence can have.

        Args:
            sequence: Enters afterwards; None has nothing kept.
        """
        num_tokens = num_logits = 0
        if sequence is not None:
            half = -(-self.num_prompt_tokens_left // 2)
            num_tokens = min(half, self._chunk_size, sequence.num_left)
            if sequence.lacks_prompt_rows and sequence.request.pooling is None:
                num_logits = -(-self.num_prompt_logits_left // 2)
        # Of all tokens too, as those that have one to compute may be many.
        self._add_room(-num_tokens, -num_logits)
        yield
        self._add_room(num_tokens, num_logits)

    def _add_room(self, num_tokens: int, num_logits: int) -> None:
        self.num_tokens_left += num_tokens
        self.num_prompt_tokens_left += num_tokens
        self.num_prompt_logits_left += num_logits

    @property
    def prompt_room(self) -> int:
        """Most tokens that one prompt can have now."""
        return min(self._chunk_size, self.num_tokens_left, self.num_prompt_tokens_left)

    def enter(self, sequence: Sequence, num_tokens: int, copies: list[BlockCopy]) -> None:
        """Have a sequence compute its next tokens; its tables hold every block already.

        Args:
            sequence: Its counts change as if the step had run.
            num_tokens: As ``num_tokens_for`` allows.
            copies: To be done before it writes.
        """
        start = sequence.num_computed_tokens
        end = start + num_tokens
        needs_logits = end == sequence.num_tokens_ahead and sequence.request.pooling is None
        rows = sequence.prompt_rows(start, end)
        entry = self._entries[sequence.seq_id] = ScheduledSequence(
            sequence,
            start,
            num_tokens,
            needs_logits,
            is_unread=end > sequence.num_tokens,
            prompt_rows=rows,
        )
        self.num_tokens_left -= num_tokens
        self.num_prompt_tokens_left -= entry.num_prompt_tokens
        if rows:
            sequence.num_prompt_rows = rows.stop
            self.num_prompt_logits_left -= entry.num_prompt_logits
        sequence.num_computed_tokens = end
        sequence.num_unread_tokens += needs_logits
        if copies:
            self._copies[sequence.seq_id] = copies

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence out again, if it is in, and note that it lost its blocks."""
        self.preempted.append(sequence.seq_id)
        entry = self._entries.pop(sequence.seq_id, None)
        if entry is not None:
            if entry.prompt_rows:
                sequence.num_prompt_rows = entry.prompt_rows.start
                self.num_prompt_logits_left += entry.num_prompt_logits
            sequence.num_unread_tokens -= entry.needs_logits
            self.num_tokens_left += entry.num_tokens
            self.num_prompt_tokens_left += entry.num_prompt_tokens
            self._copies.pop(sequence.seq_id, None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs in it yet."""
        return not self._entries

    def num_computed_before(self, sequence: Sequence) -> int:
        """Tokens of a sequence that are computed before this step."""
        entry = self._entries.get(sequence.seq_id)
        return sequence.num_computed_tokens if entry is None else entry.start

    def close(self, step_id: int, freed: tuple[int, ...]) -> Step | None:
        """The step, or None if nothing has entered.

        Args:
            step_id: Its id.
            freed: Sequences whose blocks were released since the step before.
        """
        if not self._entries:
            return None
        entries = self._entries.values()
        return Step(
            step_id=step_id,
            scheduled=(
                *(entry for entry in entries if entry.num_tokens == 1),
                *(entry for entry in entries if entry.num_tokens > 1),
            ),
            copies=self._resolved_copies(),
            freed=freed,
            preempted=tuple(self.preempted),
        )

    def _resolved_copies(self) -> tuple[BlockCopy, ...]:
        """All copies of a step are done at once, so none may read what another has written."""
        origin: dict[tuple[int, int], int] = {}
        copies: list[BlockCopy] = []
        for made in self._copies.values():
            for copy in made:
                src = origin.get((copy.group, copy.src), copy.src)
                origin[copy.group, copy.dst] = src
                copies.append(BlockCopy(copy.group, src, copy.dst))
        return tuple(copies)


def aligned(start: int, num_tokens: int, multiple: int) -> int:
    """More than a third of a chunk's tokens, so that chunks come in few shapes.

    It ends at a round position, and one that begins at such is as long as it is round.

    Args:
        start: Where the chunk begins.
        num_tokens: Its tokens.
        multiple: What the position should be a multiple of; else of the next lower power of two.
    """
    while multiple > 1:
        if multiple <= num_tokens < 3 * multiple and start % multiple == 0:
            return multiple
        rounded = (start + num_tokens) // multiple * multiple - start
        if 2 * rounded >= num_tokens:
            return rounded
        multiple //= 2
    return num_tokens
