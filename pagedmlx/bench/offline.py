"""Benchmarks of an engine in this process: one stream, a batch, shared prompt beginnings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from pagedmlx.bench.measure import Served, distribution, hit_rate, summarize
from pagedmlx.bench.workload import Workload, token_prompt
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.engine.outputs import Job, OutputEvent
from pagedmlx.engine.worker import EngineWorker

Tell = Callable[[str, int, int], None]
"""Told what is being done, and how much of how much is done."""


class Offline:
    """Gives requests to an engine and notes when each of their tokens comes.

    Args:
        worker: The engine, loaded.
        tell: Told how far it is.
    """

    def __init__(self, worker: EngineWorker, tell: Tell) -> None:
        self._worker = worker
        self._tell = tell

    def latency(self, workload: Workload, num_warm: int) -> dict[str, Any]:
        """One stream at a time.

        Args:
            workload: Its requests run one after another.
            num_warm: The first of them don't count: kernels are compiled at first use.
        """
        plan = self._plan(replace(workload, num_requests=workload.num_requests + num_warm))
        runs = [
            self._run("stream", [job], done=number, of=len(plan))[0]
            for number, job in enumerate(plan)
        ][num_warm:]
        found = summarize(runs)
        for name in ("wall_s", "requests_per_s", "output_tokens_per_s", "total_tokens_per_s"):
            del found[name]  # of streams one after another, with pauses between
        return found | {
            "prompt_tokens_per_s": distribution(r.num_prompt_tokens / r.ttft_s for r in runs),
            "decode_tokens_per_s": distribution(
                len(r.gaps_s) / sum(r.gaps_s) for r in runs if sum(r.gaps_s) > 0
            ),
        }

    def throughput(self, workload: Workload) -> dict[str, Any]:
        """All requests at once."""
        served = self._run("batch", self._plan(workload))
        stats = self._worker.call(self._worker.engine.stats).result()
        return summarize(served) | {
            "kv_peak_bytes": stats.peak_used_blocks * stats.block_bytes,
            "engine": asdict(stats),
        }

    def prefix(self, workload: Workload, prefix_len: int, num_groups: int) -> dict[str, Any]:
        """Requests that begin alike: the first one of each group alone, the others after it.

        At the end a group comes all at once, as from agents behind one system prompt.

        Args:
            workload: The requests of a group; their lengths are those of what is their own.
            prefix_len: Tokens that a group has in common.
            num_groups: How many.
        """
        generator = workload.generator()
        vocab_size = self._worker.engine.limits.vocab_size
        cold: list[Served] = []
        warm: list[Served] = []
        burst: list[Served] = []
        for number in range(num_groups + 1):
            common = token_prompt(generator, prefix_len, vocab_size)
            jobs = [
                _job([*common, *token_prompt(generator, own, vocab_size)], output)
                for own, output in workload.lengths(generator)
            ]
            if number == num_groups:
                burst = self._run("group at once", jobs)
                break
            for place, job in enumerate(jobs):
                done = number * len(jobs) + place
                (served,) = self._run("one by one", [job], done=done, of=num_groups * len(jobs))
                (warm if place else cold).append(served)
        found = {
            name: summarize(served) | {"hit_rate": hit_rate(served)}
            for name, served in (("cold", cold), ("warm", warm), ("burst", burst))
            if served
        }
        ratio = None
        if warm:
            first, later = (np.median([each.ttft_s for each in part]) for part in (cold, warm))
            ratio = float(later / first)
        return {**found, "warm_ttft_over_cold": ratio}

    def _plan(self, workload: Workload) -> list[Job]:
        generator = workload.generator()
        vocab_size = self._worker.engine.limits.vocab_size
        return [
            _job(token_prompt(generator, num_inputs, vocab_size), num_outputs)
            for num_inputs, num_outputs in workload.lengths(generator)
        ]

    def _run(
        self, what: str, jobs: Sequence[Job], *, done: int = 0, of: int | None = None
    ) -> list[Served]:
        """Give all jobs to the engine at once and wait for them.

        Raises:
            InvalidRequestError: One can't be served; none is run then.
        """
        events: SimpleQueue[tuple[float, OutputEvent]] = SimpleQueue()
        prepared = [self._worker.prepare(job) for job in jobs]
        found: dict[str, Served] = {}

        # The time is taken on the engine's thread: this one may be late.
        def sink(event: OutputEvent) -> None:
            events.put((time.perf_counter(), event))

        num_all, num_open = of or len(jobs), len(jobs)
        self._tell(what, done, num_all)
        try:
            for each in prepared:
                found[each.request_id] = Served(
                    time.perf_counter(), num_prompt_tokens=len(each.prompt_token_ids)
                )
                self._worker.submit(each, sink)
            while num_open:
                now, event = events.get()
                _note(found[event.request_id], event, now)
                if event.finish_reason is not None:
                    num_open -= 1
                    self._tell(what, done + len(jobs) - num_open, num_all)
        finally:
            for request_id in found if num_open else ():
                self._worker.abort(request_id, sink)
        return list(found.values())


def _note(served: Served, event: OutputEvent, now: float) -> None:
    if event.token_ids:
        served.times_s.append(now)
        served.num_output_tokens += len(event.token_ids)
    served.num_cached_tokens = event.num_cached_tokens
    if event.error is not None:
        served.error = str(event.error)


def _job(prompt: list[int], num_outputs: int) -> Job:
    params = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    return Job(prompt_token_ids=prompt, sampling_params=params)
