"""Random traffic through small pools: everything ends, and nothing changes anybody's output."""

from __future__ import annotations

import random

import pytest

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.step import INVALID_TOKEN
from pagedmlx.engine.engine import Engine
from pagedmlx.engine.outputs import Job, OutputCollector
from pagedmlx.errors import PoolTooSmallError, QueueFullError
from tests.support.engines import FakeRunner, assert_idle, hashed_letter, make_engine, run_job

pytestmark = pytest.mark.usefixtures("depth")


def random_engine(rng: random.Random) -> Engine:
    fault_rate = rng.choice((0.0, 0.0, 0.01))

    def choose(sequence: Sequence) -> int:
        return INVALID_TOKEN if rng.random() < fault_rate else hashed_letter(sequence)

    return make_engine(
        FakeRunner(choose),
        num_blocks=rng.choice((4, 8, 16, 40)),
        block_size=rng.choice((2, 4, 8)),
        max_num_seqs=rng.choice((1, 2, 5, 16)),
        max_num_batched_tokens=rng.choice((1, 3, 8, 40)),
        prefill_chunk_size=rng.choice((1, 5, 16)),
        max_overtakes=rng.choice((0, 1, 5)),
        max_num_waiting=rng.choice((None, 3)),
        enable_prefix_caching=rng.random() < 0.7,
    )


def random_job(rng: random.Random, number: int) -> Job:
    params = SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        seed=number,
        n=rng.choice((1, 1, 3)),
        max_tokens=rng.randint(1, 30),
        stop=rng.choice(((), ("ab",))),
        logprobs=rng.choice((None, 0, 2)),
        prompt_logprobs=rng.choice((None, None, 1)),
    )
    return Job(
        prompt="sys " * rng.randint(0, 4) + "x" * rng.randint(1, 12),
        request_id=str(number),
        priority=rng.choice((0, 0, 1, -1)),
        sampling_params=params,
    )


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic_ends_and_equals_solo(seed: int):
    rng = random.Random(seed)
    engine = random_engine(rng)
    jobs: dict[str, Job] = {}
    collectors: dict[str, OutputCollector] = {}
    num_left = rng.randint(5, 40)
    while num_left or engine.has_unfinished:
        if num_left and rng.random() < 0.4:
            job = random_job(rng, num_left)
            num_left -= 1
            try:
                prepared = engine.prepare(job)
                name = engine.add_request(prepared)
            except (PoolTooSmallError, QueueFullError):
                engine.check_integrity()
            else:
                # ``max_tokens`` as resolved for this pool, so that solo gets the same.
                jobs[name] = Job(prompt=job.prompt, sampling_params=prepared.params)
                collectors[name] = prepared.collector()
        events = engine.step()
        if collectors and rng.random() < 0.05:
            events += engine.abort(rng.choice(list(collectors)))
            engine.check_integrity()
        for event in events:
            collectors[event.request_id].add(event)
    assert_idle(engine)
    for name, collector in collectors.items():
        assert collector.finished
        solo = run_job(make_engine(num_blocks=64, enable_prefix_caching=False), jobs[name])
        whole = collector.output()
        if whole.prompt_logprobs is not None:
            assert whole.prompt_logprobs == solo.prompt_logprobs
        elif solo.prompt_logprobs is not None:
            assert not whole.outputs[0].token_ids
        for output, alone in zip(whole.outputs, solo.outputs, strict=True):
            if output.finish_reason in ("stop", "length"):
                assert output == alone
            else:
                assert alone.token_ids[: len(output.token_ids)] == output.token_ids
