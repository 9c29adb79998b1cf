"""What the engine remembers of each request in flight, until its last output has ended."""

from __future__ import annotations

from dataclasses import dataclass

from pagedmlx.core.sequence import Sequence
from pagedmlx.engine.embedding import EmbeddingSum, Vector
from pagedmlx.engine.logprobs import LogprobWriter, PromptLogprobs
from pagedmlx.engine.outputs import PositionLogprobs
from pagedmlx.text.detokenizer import Detokenizer


@dataclass(slots=True)
class LiveOutput:
    """One output's text and what of it has been told; ``logprobs`` where they are wanted."""

    detokenizer: Detokenizer
    logprobs: LogprobWriter | None = None
    finished: bool = False


@dataclass(slots=True)
class NewTokens:
    """What one step adds to an output."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[PositionLogprobs, ...] = ()
    embedding: Vector | None = None


@dataclass(slots=True)
class LiveRequest:
    """A request in flight."""

    outputs: list[LiveOutput]
    sequences: tuple[Sequence, ...]
    arrival_s: float
    prompt_logprobs: PromptLogprobs | None = None
    embedding: EmbeddingSum | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
