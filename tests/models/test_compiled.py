"""Compiled steps, with a stand-in for model and kernels: what is fixed and what is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.core.batch import PooledRows
from pagedmlx.models import compiled
from pagedmlx.models.compiled import MAX_GRAPHS, MIN_USES, CompiledSteps
from pagedmlx.models.hand_over import HandOver
from pagedmlx.models.layer_spans import LayerSpans
from pagedmlx.ops.base import PagedBatch
from tests.support.batches import make_batch


@dataclass
class Plans:
    arrays: list[np.ndarray]
    kind: str = "whole"

    @property
    def shape(self) -> tuple[object, ...]:
        return (self.kind, self.arrays[0].size)


class Store:
    """Has a token that counts the writes."""

    def __init__(self) -> None:
        self.token = mx.zeros(8, mx.int32)

    def wrote(self, token: mx.array) -> None:
        self.token = token


class Backend:
    """Plans one array per step, which the stand-in for a model adds up."""

    def __init__(self) -> None:
        self.next_plans: Plans | None = None
        self.followed: mx.array | None = None
        self.batch: PagedBatch | None = None

    def plan_ahead(self, batch: PagedBatch) -> Plans | None:
        return self.next_plans

    def follow(self, batch: PagedBatch, plans: Plans, arrays: Sequence[mx.array]) -> None:
        (self.followed,) = arrays
        self.batch = batch


class Decoding:
    def __init__(self) -> None:
        self.store: Any = Store()
        self.backend = Backend()
        self.num_runs = 0
        self.fails = False
        self.pool = mx.zeros(8, mx.int32)
        self.layers: list[Any] = [lambda x: x[:, None] + 1, *3 * [lambda x: x * 1]]
        self.hand_over = HandOver()
        self.compiled = CompiledSteps(
            self.run, self.backend, self.store, LayerSpans(self.layers), self.hand_over
        )

    def run(self, batch: PagedBatch, store: Any) -> mx.array:
        self.num_runs += 1
        if self.fails:
            raise RuntimeError("no")
        store.wrote(store.token + 1)
        assert self.backend.followed is not None
        slots = batch.groups[0].slot_mapping[: batch.num_rows]
        hidden = batch.token_ids
        for layer in self.layers:
            hidden = layer(hidden)
        rows = hidden[:, 0] - 1 + 10 * batch.positions[: batch.num_rows] + slots
        rows = (rows + self.backend.followed.sum() + self.pool[0])[:, None]
        is_all = len(batch.host.sample_rows) == batch.host.num_rows
        return rows if is_all else rows[batch.sample_rows]

    def step(
        self,
        contexts: Sequence[int],
        plan: Sequence[int],
        kind: str = "whole",
        sequences: tuple[Any, ...] = (),
        num_padding: int = 0,
    ) -> mx.array:
        """One decode step, in the usual way where there is no graph yet."""
        spans = [(context - 1, 1) for context in contexts]
        rng = np.random.default_rng(sum(contexts))
        host = make_batch(spans, block_size=4, num_blocks=256, rng=rng)
        host = replace(host, sequences=sequences, sample_sequences=sequences)
        batch = PagedBatch(host, num_padding)
        self.backend.next_plans = Plans([np.array(plan, np.int32)], kind)
        logits = self.compiled(batch)
        positions = batch.positions[: batch.num_rows]
        expected = batch.token_ids + 10 * positions + batch.groups[0].slot_mapping + sum(plan)
        assert positions.tolist()[host.num_rows :] == [0] * num_padding
        if logits is None:
            logits = self.run(batch, self.store)
        np.testing.assert_array_equal(np.array(logits[:, 0]), np.array(expected))
        return logits


def test_a_shape_is_traced_once_and_takes_new_arrays_at_every_step() -> None:
    decoding = Decoding()
    for number in range(10):
        decoding.step([5 + number, 9, 20], [number, 2 * number])
        assert decoding.store.token.tolist() == [number + 1] * 8
    # Some steps in the usual way, then the trace; after it no Python of the model runs.
    assert decoding.num_runs == MIN_USES


def test_steps_of_other_shapes_are_other_graphs() -> None:
    decoding = Decoding()
    for _ in range(MIN_USES + 1):
        decoding.step([5], [1, 2])
        decoding.step([5, 6], [1, 2])
        decoding.step([5], [1, 2, 3])
        decoding.step([5], [1, 2], kind="split")
    assert decoding.num_runs == 4 * MIN_USES


def test_steps_that_padding_makes_alike_are_one_graph() -> None:
    decoding = Decoding()
    for number in range(10):
        count = 12 - number % 3
        decoding.step([5 + number] * count, [number, 1], num_padding=12 - count)
    assert decoding.num_runs == MIN_USES
    assert len(decoding.compiled._graphs) == 1


def test_shapes_that_come_and_go_are_not_traced_and_graphs_are_bounded() -> None:
    decoding = Decoding()
    for count in range(1, 2 * MAX_GRAPHS):
        decoding.step([3] * count, [1])
    assert len(decoding.compiled._graphs) == 0
    assert len(decoding.compiled._uses) <= MAX_GRAPHS
    for count in range(1, MAX_GRAPHS + 4):
        for _ in range(MIN_USES):
            decoding.step([3], list(range(count)))
    assert len(decoding.compiled._graphs) == MAX_GRAPHS


def test_the_graph_that_was_not_used_for_longest_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "MAX_GRAPHS", 2)
    decoding = Decoding()

    def num_runs(count: int, times: int = 1) -> int:
        before = decoding.num_runs
        for _ in range(times):
            decoding.step([5] * count, [1])
        return decoding.num_runs - before

    for count in (1, 2):
        assert num_runs(count, MIN_USES) == MIN_USES
    assert num_runs(1) == 0
    assert num_runs(3, MIN_USES) == MIN_USES
    assert [num_runs(count) for count in (1, 3, 2)] == [0, 0, 1]


def test_steps_with_prompts_are_compiled_where_they_are_planned_ahead() -> None:
    decoding = Decoding()
    rng = np.random.default_rng(0)
    for number in range(10):
        host = make_batch([(4, 1), (number, 5)], block_size=4, num_blocks=64, rng=rng)
        rows = [[0, 5], [3, 5]][number % 2]
        batch = PagedBatch(replace(host, sample_rows=np.array(rows, np.int32)), 2)
        decoding.backend.next_plans = Plans([np.array([number, 1], np.int32)])
        logits = decoding.compiled(batch)
        if logits is None:
            logits = decoding.run(batch, decoding.store)
        expected = batch.token_ids + 10 * batch.positions[:8] + batch.groups[0].slot_mapping
        expected = (expected + number + 1)[batch.sample_rows]
        np.testing.assert_array_equal(np.array(logits[:, 0]), np.array(expected))
    # They are two spans, of which the second is run as it is while the first is traced.
    assert decoding.num_runs == MIN_USES + 2


@pytest.mark.parametrize(
    ("chunks", "num_compiled"),
    [
        ([(3, 1), (0, 5)], [0, 0, 0, 0, 1, 1, 1, 1, 0, 0]),
        ([(0, 5)], [0, 0, 0, 0, 4, 0, 0, 0, 0, 0]),
    ],
)
def test_streams_wait_for_one_trace_at_a_time(
    chunks: list[tuple[int, int]], num_compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding, counts = Decoding(), list[int]()
    decoding.compiled._spans.parts = tuple(range(each, each + 1) for each in range(4))
    compile_one = mx.compile

    def count(function: Any) -> Any:
        counts[-1] += 1
        return compile_one(function)

    monkeypatch.setattr(mx, "compile", count)
    host = make_batch(chunks, block_size=4, num_blocks=64, rng=np.random.default_rng(0))
    for _ in num_compiled:
        counts.append(0)
        decoding.backend.next_plans = Plans([np.array([1], np.int32)])
        logits = decoding.compiled(PagedBatch(host))
        assert (logits is None) == (len(counts) < MIN_USES)
    assert counts == num_compiled


def test_a_device_begins_with_prompts_before_their_step_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoding, evaluated = Decoding(), list[tuple[int, ...]]()
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: evaluated.append(arrays[0].shape))
    waits: list[int] = []
    monkeypatch.setattr(mx, "synchronize", lambda: waits.append(len(evaluated)))
    rng = np.random.default_rng(0)
    for is_short in (False, True):
        decoding.hand_over.memory_is_short = lambda is_short=is_short: is_short
        for spans, expected in (([(0, 9)], [(9,), (9, 1)]), ([(4, 1), (7, 1)], [])):
            host = make_batch(spans, block_size=4, num_blocks=64, rng=rng)
            for _ in range(MIN_USES):
                evaluated.clear()
                waits.clear()
                decoding.backend.next_plans = Plans([np.array([1], np.int32)])
                decoding.compiled(PagedBatch(host))
            assert evaluated == expected
            # Metadata and the first span; the last one is handed over by who wants the logits.
            assert waits == ([len(expected)] if is_short and expected else [])


def test_steps_of_other_rows_to_sample_are_other_graphs() -> None:
    decoding = Decoding()
    rng = np.random.default_rng(0)
    host = make_batch([(0, 6)], block_size=4, num_blocks=64, rng=rng)
    for _ in range(MIN_USES):
        for rows in ([5], [4, 5], range(6)):
            decoding.backend.next_plans = Plans([np.array([1], np.int32)])
            batch = PagedBatch(replace(host, sample_rows=np.array(rows, np.int32)))
            decoding.compiled(batch)
    assert len(decoding.compiled._graphs) == 3


def test_steps_that_are_not_planned_or_give_no_logits_take_the_usual_way() -> None:
    decoding = Decoding()
    rng = np.random.default_rng(0)
    host = make_batch([(4, 1)], block_size=4, num_blocks=64, rng=rng)
    no_samples = replace(host, sample_rows=np.empty(0, np.int32))
    pooled = replace(host, pooled=(PooledRows(None, range(1)),))
    for _ in range(MIN_USES + 1):
        decoding.backend.next_plans = Plans([np.array([1], np.int32)])
        assert decoding.compiled(PagedBatch(no_samples)) is None
        assert decoding.compiled(PagedBatch(pooled)) is None
        decoding.backend.next_plans = None
        assert decoding.compiled(PagedBatch(host)) is None


def test_a_trace_that_fails_leaves_the_token_as_it_was() -> None:
    decoding = Decoding()
    for _ in range(MIN_USES - 1):
        decoding.step([5], [1])
    decoding.fails = True
    with pytest.raises(RuntimeError, match="no"):
        decoding.step([5], [1])
    assert decoding.store.token.tolist() == [MIN_USES - 1] * 8


def test_a_trace_that_fails_in_mid_step_keeps_the_token_of_what_has_begun() -> None:
    decoding = Decoding()
    host = make_batch([(0, 5)], block_size=4, num_blocks=64, rng=np.random.default_rng(0))
    decoding.backend.next_plans = Plans([np.array([1], np.int32)])
    for _ in range(MIN_USES - 1):
        assert decoding.compiled(PagedBatch(host)) is None
    decoding.layers[2:] = [lambda x: x.no_such_attribute] * 2
    for count in (1, 2):
        with pytest.raises(AttributeError):
            decoding.compiled(PagedBatch(host))
        assert decoding.store.token.tolist() == [count] * 8
    decoding.layers[2:] = [lambda x: x * 1] * 2
    assert decoding.compiled(PagedBatch(host)) is not None
    assert decoding.store.token.tolist() == [4] * 8


def test_graphs_and_the_arrays_in_them_are_gone_at_once_when_dropped() -> None:
    decoding = Decoding()
    decoding.pool = mx.zeros((1 << 20,), mx.int32)
    mx.eval(decoding.pool)
    gc.disable()
    try:
        for _ in range(MIN_USES + 2):
            decoding.step([5, 9], [1, 2, 3])
        mx.synchronize()
        before = mx.get_active_memory()
        decoding.pool = mx.zeros(8, mx.int32)
        assert mx.get_active_memory() > before - (4 << 20)
        decoding.compiled.drop()
        assert mx.get_active_memory() <= before - (4 << 20) + 4096
    finally:
        gc.enable()


def test_shapes_that_had_a_graph_get_one_again_when_they_come_once_more() -> None:
    decoding = Decoding()
    for _ in range(MIN_USES + 2):
        decoding.step([5, 9], [1, 2, 3])
    decoding.step([5], [1])
    decoding.compiled.drop()
    for _ in range(3):
        decoding.step([5, 9], [1, 2, 3])
    # The first ones, of which the last is traced; the other shape; and another trace.
    assert decoding.num_runs == MIN_USES + 1 + 1


def test_a_graph_keeps_no_sequence_of_the_step_that_it_was_made_for() -> None:
    class Marker:
        pass

    decoding, markers = Decoding(), [Marker() for _ in range(MIN_USES)]
    gone = [weakref.ref(marker) for marker in markers]
    while markers:
        decoding.step([5], [1], sequences=(markers.pop(),))
    assert decoding.compiled._graphs
    gc.collect()
    assert [ref() for ref in gone] == [None] * MIN_USES
