"""The scheduler under every order of events that hypothesis can think of, driven like an engine."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedmlx.core.request import Request
from pagedmlx.core.step import Step
from pagedmlx.errors import PoolTooSmallError
from tests.support.core import Driver, make_request
from tests.support.schedules import first_prompt_gets_on
from tests.support.strategies import drivers, requests


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, end and are aborted; ``Driver`` checks each step against its ghost."""

    driver: Driver

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0

    @initialize(driver=drivers())
    def start(self, driver: Driver) -> None:
        self.driver = driver

    @rule(data=st.data(), count=st.integers(1, 4))
    def add(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self._add(data.draw(requests(f"r{self.num_requests}")))
            self.num_requests += 1

    @rule(lengths=st.lists(st.integers(5, 30), min_size=2, max_size=4))
    def add_long_prompts(self, lengths: list[int]) -> None:
        """Nothing alike, so that they ask for more than a step has."""
        for length in lengths:
            prompt = (3, self.num_requests % 256, *[0] * length)[:length]
            self._add(make_request(prompt, 2, request_id=f"r{self.num_requests}"))
            self.num_requests += 1

    def _add(self, request: Request) -> None:
        needed = len(request.prompt_token_ids) + request.max_output_tokens - 1
        fits = needed <= self.driver.kv.capacity_tokens
        try:
            sequences = self.driver.add(request)
        except PoolTooSmallError:
            assert not fits
        else:
            assert fits
            assert [s.index for s in sequences] == list(range(request.params.n))

    @precondition(lambda self: self.driver.scheduler.has_unfinished)
    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            with first_prompt_gets_on(self.driver):
                self.driver.step()

    @precondition(lambda self: self.driver.scheduler.has_unfinished)
    @rule(data=st.data())
    def abort_while_a_step_runs(self, data: st.DataObject) -> None:
        def abort(step: Step) -> None:
            entry = data.draw(st.sampled_from(step.scheduled))
            self.driver.scheduler.abort(entry.sequence.request.request_id)

        self.driver.step(between=abort)

    @precondition(lambda self: self.num_requests > 0)
    @rule(data=st.data())
    def abort_between_steps(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.num_requests - 1))
        ended = self.driver.scheduler.abort(f"r{number}")
        assert all(sequence.is_finished for sequence in ended)
        assert not self.driver.scheduler.abort(f"r{number}")

    @rule(limit=st.sampled_from([None, None, 2, 5, 9, 16]))
    def pace_prompts(self, limit: int | None) -> None:
        self.driver.scheduler.max_prompt_tokens = limit

    @rule()
    def forget_cached_blocks(self) -> None:
        self.driver.kv.reset_cache()
        assert all(pool.num_cached_blocks == 0 for pool in self.driver.kv.pools)

    @invariant()
    def everything_agrees(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.check_integrity()

    @invariant()
    def what_is_ahead_is_within_the_pool(self) -> None:
        if hasattr(self, "driver"):
            kv = self.driver.kv
            ahead = self.driver.scheduler.num_blocks_ahead()
            for pool, count in zip(kv.pools, ahead, strict=True):
                assert pool.num_created_blocks <= count <= pool.num_blocks

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        scheduler = self.driver.scheduler
        alive = (*scheduler.running, *scheduler.waiting)
        # Each step makes a token or computes one that a preemption may void at most once a token.
        longest = max((s.num_prompt_tokens + s.request.max_output_tokens for s in alive), default=0)
        num_tokens = sum(s.request.max_output_tokens for s in alive)
        # Steps under way when nothing can be scheduled before them are updated one at a time.
        depth = self.driver.depth
        self.driver.run(max_steps=depth + (1 + depth) * (1 + num_tokens * longest))
        self.driver.check_outputs()
        self.driver.check_empty()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=30)
