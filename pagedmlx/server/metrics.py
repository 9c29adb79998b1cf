"""Counts and times for Prometheus: vLLM's names where the meaning is the same, else our own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from pagedmlx.core.stats import EngineStats
from pagedmlx.engine.outputs import OutputEvent

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_TOKENS = tuple(float(4**power) for power in range(10))

_LABELS = ("model_name",)
_GAUGES = (
    ("vllm:num_requests_running", "Sequences running now.", "num_running"),
    ("vllm:num_requests_waiting", "Sequences waiting now.", "num_waiting"),
    ("pagedmlx:blocks", "Blocks in the pool.", "num_blocks"),
    ("pagedmlx:blocks_used", "Blocks that live sequences hold.", "num_used_blocks"),
    ("pagedmlx:blocks_cached", "Blocks that are kept for their content.", "num_cached_blocks"),
    ("pagedmlx:blocks_free", "Blocks that hold nothing of use.", "num_free_blocks"),
    ("pagedmlx:blocks_shared", "Blocks that several sequences hold.", "num_shared_blocks"),
    ("pagedmlx:pool_bytes", "Bytes that the pool may take.", "pool_bytes"),
    ("pagedmlx:allocated_bytes", "Bytes that it takes now.", "allocated_bytes"),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "Tokens of prompts.", "num_prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "num_output_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up.", "num_prompt_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens that were shared.", "num_cached_tokens"),
    ("vllm:num_preemptions", "Sequences that lost their blocks.", "num_preemptions"),
    ("pagedmlx:waits", "Sequences that had to wait for blocks.", "num_waits"),
    ("pagedmlx:evictions", "Cached blocks given up.", "num_evictions"),
    ("pagedmlx:block_copies", "Blocks copied on write.", "num_copies"),
    ("pagedmlx:steps", "Steps scheduled.", "num_steps"),
)


class Metrics:
    """What one server has counted.

    Args:
        model_name: The label of all that vLLM labels with it.
    """

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._registry = CollectorRegistry()
        self._responses = self._counter(
            "pagedmlx:http_responses", "Answers by path and status.", "path", "status"
        )
        self._finished = self._counter(
            "vllm:request_success", "Outputs that ended.", "model_name", "finished_reason"
        )
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS
        )
        self._gap = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of an output.", _GAP_SECONDS
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "From arrival to being scheduled.", _SECONDS
        )
        self._total = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", _SECONDS
        )
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output = self._histogram(
            "vllm:request_generation_tokens", "Tokens of an output.", _TOKENS
        )

    def count_response(self, path: str, status: int) -> None:
        """Note an answer; ``path`` is a route of ours or empty, never what a client made up."""
        self._responses.labels(path, str(status)).inc()

    def watch(self, num_prompt_tokens: int, num_outputs: int) -> RequestWatch:
        """Note a request and what becomes of it."""
        self._prompt.labels(self._model).observe(num_prompt_tokens)
        return RequestWatch(self, num_outputs)

    def exposition(self, stats: EngineStats | None) -> bytes:
        """Everything in Prometheus' text format.

        Args:
            stats: The engine's counts; None when it can't tell them.
        """
        registry = CollectorRegistry()
        registry.register(_EngineCounts(self._model, stats))
        return generate_latest(self._registry) + generate_latest(registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)

    def first_token(self, seconds: float) -> None:
        """Note how long a request waited for its first token."""
        self._ttft.labels(self._model).observe(seconds)

    def gap(self, seconds: float) -> None:
        """Note the time between two tokens of one output."""
        self._gap.labels(self._model).observe(seconds)

    def ended(self, event: OutputEvent, num_tokens: int) -> None:
        """Note the last event of an output."""
        self._finished.labels(self._model, event.finish_reason).inc()
        self._output.labels(self._model).observe(num_tokens)
        if event.metrics is not None:
            self._total.labels(self._model).observe(event.metrics.total_s)
            if event.metrics.queue_s is not None:
                self._queue.labels(self._model).observe(event.metrics.queue_s)


@dataclass(frozen=True, slots=True)
class _EngineCounts:
    """What the engine counts by itself, at one moment."""

    model: str
    stats: EngineStats | None

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("pagedmlx:engine_up", "Whether the engine works.")
        up.add_metric([], float(self.stats is not None))
        yield up
        if self.stats is None:
            return
        usage = self.stats.num_used_blocks / max(1, self.stats.num_blocks)
        yield self._filled(
            GaugeMetricFamily("vllm:kv_cache_usage_perc", "Used blocks, 1 is all.", labels=_LABELS),
            usage,
        )
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, field in table:
                yield self._filled(kind(name, text, labels=_LABELS), getattr(self.stats, field))

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: float
    ) -> GaugeMetricFamily | CounterMetricFamily:
        family.add_metric([self.model], value)
        return family


class RequestWatch:
    """Measures one request by its events as they come."""

    def __init__(self, metrics: Metrics, num_outputs: int) -> None:
        self._metrics = metrics
        self._last_s: list[float | None] = [None] * num_outputs
        self._num_tokens = [0] * num_outputs
        self._has_begun = False

    def note(self, event: OutputEvent) -> None:
        """Take in the next event."""
        if event.token_ids:
            now = time.monotonic()
            last = self._last_s[event.index]
            if last is not None:
                self._metrics.gap((now - last) / len(event.token_ids))
            self._last_s[event.index] = now
            self._num_tokens[event.index] += len(event.token_ids)
            if not self._has_begun and event.metrics and event.metrics.ttft_s is not None:
                self._has_begun = True
                self._metrics.first_token(event.metrics.ttft_s)
        if event.finish_reason is not None:
            self._metrics.ended(event, self._num_tokens[event.index])
