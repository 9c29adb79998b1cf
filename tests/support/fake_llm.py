"""A stand-in for pagedmlx.llm that needs no weights: it answers the prompt in capitals.

Words steer it: FAIL refuses the request, SLOW takes its time, BREAK breaks an invariant, SHOW tells
the settings and VARIABLES those of the chat template. A model whose name has ``bare`` in it has no
chat template, and one with ``wild`` wants to be sampled.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import TracebackType
from typing import Any

from pagedmlx.config import EngineConfig
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.stats import EngineStats
from pagedmlx.engine.outputs import CompletionOutput, Job, RequestMetrics, RequestOutput
from pagedmlx.errors import PoolTooSmallError


class LLM:
    """The same face as the real one."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        on_progress: Callable[[str, float | None], None] | None = None,
    ) -> None:
        self.config = config
        self.has_chat_template = "bare" not in config.model
        self.sampling_defaults = {"temperature": 0.7, "top_k": 20} if "wild" in config.model else {}
        self.load_notes = ["BLAS: none"]
        self.closed = False
        self.broken = False
        self.num_tokens = 0
        if on_progress is not None:
            on_progress("loading", 0.5)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True

    def stream(
        self,
        prompt: str | list[Any],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        params = sampling_params or SamplingParams()
        words = self._answer(prompt, chat_template_kwargs)
        if "FAIL" in words:
            raise PoolTooSmallError("prompt", "needs 9 blocks, the pool has 8")
        for count in range(1, len(words) + 1):
            if "SLOW" in words:
                time.sleep(0.05)
            yield self._output(prompt, words[:count], params, done=count == len(words))

    def generate_iter(
        self, jobs: Iterable[Job], *, max_in_flight: int = 4
    ) -> Iterator[RequestOutput]:
        iterator = iter(jobs)
        while batch := list(islice(iterator, max_in_flight)):
            # The last comes first: nobody may count on the order.
            for job in reversed(batch):
                prompt = job.prompt if job.messages is None else list(job.messages)
                if prompt is None:
                    prompt = " ".join(map(str, job.prompt_token_ids or ()))
                words = self._answer(prompt, job.chat_template_kwargs)
                assert job.request_id is not None
                if "SLOW" in words:
                    time.sleep(0.2)
                if "FAIL" in words:
                    error = PoolTooSmallError("prompt", "needs 9 blocks, the pool has 8")
                    output = RequestOutput(job.request_id, None, (), (), True, error=error)
                else:
                    output = self._output(prompt, words, job.sampling_params, done=True)
                yield dataclasses.replace(output, request_id=job.request_id)

    def stats(self) -> EngineStats:
        return EngineStats(
            block_size=self.config.block_size,
            num_blocks=self.config.num_blocks or 100,
            peak_used_blocks=7,
            num_waits=3,
            max_waste_slots=5,
            mean_fill_while_waiting=0.9,
            num_output_tokens=self.num_tokens,
            block_bytes=1024,
        )

    def check_integrity(self) -> None:
        assert not self.broken, "block 3 is in two tables"

    def _answer(self, prompt: str | list[Any], variables: Mapping[str, Any] | None) -> list[str]:
        if isinstance(prompt, str):
            words = ["raw", *prompt.split()]
        else:
            words = [word for m in prompt for word in (f"{m['role']}:", *m["content"].split())]
        if "VARIABLES" in words:
            words.append(str(dict(variables or {})))
        self.broken = self.broken or "BREAK" in words
        self.num_tokens += len(words)
        return words

    def _output(
        self, prompt: str | list[Any], words: list[str], params: SamplingParams, *, done: bool
    ) -> RequestOutput:
        settings = ""
        if "SHOW" in words:
            top_k = f" k={params.top_k}" if params.top_k else ""
            settings = f" t={params.temperature:g}{top_k} m={params.max_tokens}"
        text = " ".join(words).upper() + settings
        delta = (" " if len(words) > 1 else "") + words[-1].upper() + settings
        outputs = tuple(
            CompletionOutput(
                index,
                text=text,
                delta=delta,
                token_ids=tuple(range(len(words))),
                finish_reason="stop" if done else None,
            )
            for index in range(params.n)
        )
        metrics = RequestMetrics(queue_s=0.0, ttft_s=0.01, total_s=0.5)
        return RequestOutput("0", None, (1, 2, 3), outputs, done, metrics=metrics)
