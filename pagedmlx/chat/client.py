"""What the chat asks of whoever writes the answers, in words that know no engine and no HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.snapshot import EngineSnapshot
from pagedmlx.progress import ProgressCallback


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One question.

    Attributes:
        request_id: Unique among those in flight.
        messages: The conversation so far, in OpenAI's form.
        params: How to sample; its ``n`` is the number of candidates.
    """

    request_id: str
    messages: Sequence[Mapping[str, str]]
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class Delta:
    """What has been added to one candidate.

    Attributes:
        index: Which candidate.
        text: New text; reasoning is between ``<think>`` and ``</think>``.
        finish: ``stop``, ``length``, ``abort`` or ``error`` when it ended here, else None.
        num_prompt_tokens: Tokens of the prompt; None while unknown.
        num_cached_tokens: Those of them that needn't be computed.
        num_output_tokens: Tokens of this candidate so far; None while unknown.
        ttft_s: From the request to the first token; None while unknown.
    """

    index: int = 0
    text: str = ""
    finish: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    ttft_s: float | None = None


class ChatClient(Protocol):
    """Writes answers; implemented over the engine in this process and over an HTTP endpoint.

    Attributes:
        name: What to call the model.
        max_len: Longest prompt plus answer in tokens; None while unknown.
        notes: Lines about how it was set up.
        defaults: Fields of ``SamplingParams`` that the model's maker recommends.
    """

    name: str
    max_len: int | None
    notes: tuple[str, ...]
    defaults: Mapping[str, float]

    async def start(self, on_progress: ProgressCallback) -> None:
        """Load the model, or reach the endpoint; ``on_progress`` may be called on any thread.

        Raises:
            PagedMLXError: It can't be done; another ``start`` may be tried.
        """
        ...

    def answer(self, request: ChatRequest) -> AsyncGenerator[Delta]:
        """Answer a question; cancelling the iteration ends the work.

        Raises:
            PagedMLXError: It was refused, or failed on the way.
        """
        ...

    async def snapshot(self) -> EngineSnapshot | None:
        """Who holds which block now; None where nothing tells.

        Raises:
            PagedMLXError: Nobody is there any more; it may come back.
        """
        ...

    async def close(self) -> bool:
        """End everything; returns soon, whatever is under way.

        Returns:
            Whether all of it has ended; if not, the process should not wait for it.
        """
        ...
