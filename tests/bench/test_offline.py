"""The benchmarks over an engine without a model, whose counts are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from pagedmlx.bench.offline import Offline
from pagedmlx.bench.workload import Workload
from pagedmlx.engine.worker import EngineWorker
from pagedmlx.errors import InvalidRequestError
from tests.support.engines import make_engine


class Progress(list[tuple[str, int, int]]):
    def __call__(self, what: str, done: int, of: int) -> None:
        self.append((what, done, of))


@pytest.fixture
def progress() -> Progress:
    return Progress()


@pytest.fixture
def offline(progress: Progress) -> Iterator[Offline]:
    worker = EngineWorker(lambda _report: make_engine())
    worker.start().result()
    with closing(worker):
        yield Offline(worker, progress)


def test_streams_run_alone_and_the_warm_ones_do_not_count(
    offline: Offline, progress: Progress
) -> None:
    found = offline.latency(Workload(3, 20, 6), num_warm=2)
    assert (found["num_requests"], found["num_failed"]) == (3, 0)
    assert found["num_prompt_tokens"] == 60
    assert found["num_output_tokens"] == 18
    assert found["num_cached_tokens"] == 0
    assert found["decode_tokens_per_s"]["p50"] > 0
    assert progress[-1] == ("stream", 5, 5)
    stats = offline._worker.engine.stats()
    assert stats.peak_used_blocks == -(-25 // 4)


def test_a_batch_is_all_there_at_once(offline: Offline, progress: Progress) -> None:
    found = offline.throughput(Workload(6, 12, 5, 0.5))
    assert found["num_failed"] == 0
    assert found["engine"]["num_requests"] == 6
    assert found["engine"]["num_output_tokens"] == found["num_output_tokens"]
    assert found["itl_s"] is not None
    assert progress[-1] == ("batch", 6, 6)


def test_what_begins_alike_is_computed_once_for_each_group(offline: Offline) -> None:
    found = offline.prefix(Workload(3, 4, 2), prefix_len=40, num_groups=2)
    assert found["cold"]["num_requests"] == 2
    assert found["cold"]["hit_rate"] == 0
    assert found["warm"]["num_requests"] == 4
    assert found["warm"]["num_cached_tokens"] >= 4 * 40
    # The first of the burst computes what the others wait for.
    assert found["burst"]["num_cached_tokens"] >= 2 * 40
    assert found["warm_ttft_over_cold"] > 0


def test_a_request_that_cannot_fit_is_refused_before_anything_runs(offline: Offline) -> None:
    with pytest.raises(InvalidRequestError):
        offline.throughput(Workload(2, 1000, 5))
    assert offline._worker.engine.stats().num_requests == 0
