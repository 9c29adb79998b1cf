"""The two values that cross between scheduler and runner: Step goes out, StepResult comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagedmlx.core.sequence import Sequence
from pagedmlx.errors import NoTokenLeftError


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: tokens [start, start + num_tokens) are computed.

    Attributes:
        sequence: Read only for the runner.
        start: Position of the first token to compute; K and V of [0, start) are in the pool.
        num_tokens: How many tokens are computed, at least 1.
        needs_logits: The last of them is the sequence's last token, so a new one is sampled.
        is_unread: That last token was sampled by the step before and is known to the device only.
        prompt_rows: Positions among them of which something is wanted: the hidden state for an
            embedding, else logits that tell how likely the prompt's next token is.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    needs_logits: bool
    is_unread: bool = False
    prompt_rows: range = range(0)

    @property
    def num_prompt_logits(self) -> int:
        """Rows of logits that tell of the prompt."""
        return 0 if self.sequence.request.pooling is not None else len(self.prompt_rows)

    @property
    def completes_embedding(self) -> bool:
        """Whether an embedding is wanted, and its prompt is computed with this."""
        is_wanted = self.sequence.request.pooling is not None
        return is_wanted and self.start + self.num_tokens == self.sequence.num_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Its tokens if it computes a prompt (or one anew), 0 if it takes one more step."""
        is_last = self.needs_logits or self.completes_embedding
        return self.num_tokens if self.num_tokens > 1 or not is_last else 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy on write: block ``src`` of ``group`` is copied to ``dst`` before the step writes."""

    group: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass computes; decode rows (one token) come before prefill chunks.

    Attributes:
        step_id: Rises by one with each step.
        scheduled: The sequences that run, those with a single token first.
        copies: Block copies, all to be done before the first write.
        freed: Ids of sequences whose blocks were released since the step before.
        preempted: Ids of sequences that lost their blocks to others in this step.
    """

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...]
    freed: tuple[int, ...]
    preempted: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(entry.num_tokens for entry in self.scheduled)

    @property
    def num_prompt_tokens(self) -> int:
        """Those of them that belong to prompts."""
        return sum(entry.num_prompt_tokens for entry in self.scheduled)


INVALID_TOKEN = -1
"""Takes the place of a token where a row's logits leave nothing to choose from."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found a token, and what it found most likely, at one position.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability.
        rank: 1 for the most likely token; equally likely ones share a rank.
        top: The most likely tokens, likeliest first, with their log probabilities; as many as the
            request wants.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out of a step.

    Attributes:
        step_id: The step's.
        sampled: Sequence id to its new token or INVALID_TOKEN, one for each entry with
            ``needs_logits``.
        logprobs: Sequence id to what is said of that token, where the request wants it.
        prompt_logprobs: Sequence id to what is said of the tokens after each of ``prompt_rows``.
        pooled: Sequence id to the sum of the hidden states of ``prompt_rows``, (D,) each, where an
            embedding is wanted.
        ended: Ids of sequences whose grammar allows nothing behind their new token.
        problems: Sequence id to why its grammar can't go on.
    """

    step_id: int
    sampled: Mapping[int, int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(
        default_factory=dict[int, tuple[TokenLogprobs, ...]]
    )
    pooled: Mapping[int, npt.NDArray[np.float32]] = field(
        default_factory=dict[int, npt.NDArray[np.float32]]
    )
    ended: frozenset[int] = frozenset()
    problems: Mapping[int, NoTokenLeftError] = field(default_factory=dict[int, NoTokenLeftError])
