"""Processors do what is written for one row alone, whoever else is in the batch and when."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.sequence import Sequence as TextSequence
from pagedmlx.sampling.processors import LogitProcessors
from pagedmlx.sampling.sampler import SampleRow
from tests.support.sampling import changed_logits, make_sequence

VOCABULARY = 9
TOKENS = st.integers(0, VOCABULARY - 1)
TEXTS = st.lists(TOKENS, max_size=8)
SETTINGS: dict[str, st.SearchStrategy] = {
    "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 100.0]),
    "presence_penalty": st.sampled_from([-2.0, 0.0, 0.7]),
    "frequency_penalty": st.sampled_from([-0.4, 0.0, 2.0]),
    "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100, -1.5, 0, 100])),
    "allowed_token_ids": st.none() | st.sets(TOKENS, min_size=1).map(tuple),
    "min_tokens": st.integers(0, 4),
}
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=5)
LOGITS = st.lists(
    st.sampled_from([-3.5, -1.0, 0.0, 0.25, 2.0, 7.0]), min_size=VOCABULARY, max_size=VOCABULARY
)


@st.composite
def sequences(draw: st.DrawFn, seq_id: int = 0, names: tuple[str, ...] = tuple(SETTINGS)):
    params = SamplingParams(**{name: draw(SETTINGS[name]) for name in names})
    return make_sequence(
        seq_id,
        params,
        [draw(TOKENS), *draw(TEXTS)],
        draw(TEXTS),
        stop_token_ids=draw(st.sets(TOKENS, max_size=3)),
        bad_words=draw(WORDS) if "bad_words" in names or len(names) > 1 else (),
    )


def apply(
    processors: LogitProcessors, logits: np.ndarray, texts: list[TextSequence], newest: list[int]
) -> np.ndarray:
    """One step in which the texts' last tokens are ``newest``, read by the host or not."""
    rows = [SampleRow(text.request.params, 0, 0, text.num_tokens_ahead, text) for text in texts]
    # A step has other rows too; the newest tokens are at odd places here.
    token_ids = np.full(2 * len(texts), 77, np.int32)
    token_ids[1::2] = newest
    places = np.arange(len(texts)) * 2 + 1
    changed = processors.apply(mx.array(logits), rows, mx.array(token_ids), places)
    return np.array(changed.astype(mx.float32))


def check(changed: np.ndarray, logits: np.ndarray, text: TextSequence, output: list[int]) -> None:
    expected = changed_logits(logits, text.request, output)
    np.testing.assert_allclose(changed, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*SETTINGS, "bad_words"])
@given(data=st.data())
def test_each_setting_alone_changes_a_row_as_written(name: str, data: st.DataObject):
    names = (name,) if name in SETTINGS else ()
    text = data.draw(sequences(names=names))
    if name == "bad_words":
        text = make_sequence(
            0, text.request.params, text.request.prompt_token_ids, text.output_token_ids,
            bad_words=data.draw(WORDS),
        )  # fmt: skip
    logits = np.array([data.draw(LOGITS)], np.float32)
    changed = apply(LogitProcessors(), logits, [text], [text.token_ids[-1]])
    check(changed[0], logits[0], text, text.output_token_ids)


@given(data=st.data(), count=st.integers(1, 5))
def test_together_they_change_every_row_of_a_batch_as_written_for_it_alone(
    data: st.DataObject, count: int
):
    texts = [data.draw(sequences(seq_id)) for seq_id in range(count)]
    logits = np.array([data.draw(LOGITS) for _ in texts], np.float32)
    changed = apply(LogitProcessors(), logits, texts, [text.token_ids[-1] for text in texts])
    for row, text in enumerate(texts):
        check(changed[row], logits[row], text, text.output_token_ids)
        alone = apply(LogitProcessors(), logits[[row]], [text], [text.token_ids[-1]])
        assert np.array_equal(changed[row], alone[0])


@dataclass
class Life:
    """A sequence with what the device has sampled for it beyond what the host has read."""

    text: TextSequence
    output: list[int] = field(default_factory=list)

    def read(self) -> None:
        self.text.token_ids[self.text.num_prompt_tokens :] = self.output
        self.text.num_unread_tokens = 0


@given(data=st.data(), depth=st.integers(0, 1))
def test_rows_keep_their_state_while_others_come_go_and_lose_their_blocks(
    data: st.DataObject, depth: int
):
    processors = LogitProcessors()
    lives: list[Life] = []
    dropped: list[int] = []
    next_id = 0
    for _ in range(data.draw(st.integers(1, 10))):
        for _ in range(data.draw(st.integers(0, 2))):
            text = data.draw(sequences(next_id))
            lives.append(Life(text, text.output_token_ids))
            next_id += 1
        if lives and data.draw(st.booleans()):
            life = data.draw(st.sampled_from(lives))
            dropped.append(life.text.seq_id)
            if data.draw(st.booleans()):
                lives.remove(life)
            else:
                life.read()  # preempted: it goes on once all its tokens are known
        processors.drop(dropped)
        dropped.clear()
        running = data.draw(st.permutations(lives).flatmap(lambda some: st.just(some)))
        running = running[: data.draw(st.integers(0, len(running)))]
        if not running:
            continue
        logits = np.array([data.draw(LOGITS) for _ in running], np.float32)
        newest = [life.output[-1] if life.output else life.text.token_ids[-1] for life in running]
        changed = apply(processors, logits, [life.text for life in running], newest)
        tokens = data.draw(st.lists(TOKENS, min_size=len(running), max_size=len(running)))
        mx.eval(processors.sampled(mx.array(tokens, mx.int32)))
        for row, life in enumerate(running):
            check(changed[row], logits[row], life.text, life.output)
        # The host reads what came before, and at depth 0 also this step's tokens.
        for life in lives:
            life.read()
        for life, token in zip(running, tokens, strict=True):
            life.output.append(token)
            life.text.num_unread_tokens = 1
            if depth == 0:
                life.read()
    processors.drop(range(next_id))
    assert processors._counts.table is None
    assert len(processors._counts) == 0


def test_logits_that_nobody_wants_changed_are_passed_on_untouched():
    logits = mx.zeros((2, VOCABULARY), mx.bfloat16)
    texts = [
        make_sequence(0, SamplingParams(temperature=0.0), [1]),
        make_sequence(1, SamplingParams(min_tokens=1), [1], [2]),
    ]
    rows = [SampleRow(text.request.params, 0, 0, text.num_tokens, text) for text in texts]
    processors = LogitProcessors()
    assert processors.apply(logits, rows, mx.zeros(2, mx.int32), np.arange(2)) is logits
    assert processors.sampled(mx.zeros(2, mx.int32)) == []


def test_half_precision_logits_are_changed_in_single_precision():
    text = make_sequence(0, SamplingParams(logit_bias={1: 0.001}), [1])
    logits = mx.full((1, VOCABULARY), 8.0, mx.bfloat16)
    row = SampleRow(text.request.params, 0, 0, 1, text)
    changed = LogitProcessors().apply(logits, [row], mx.zeros(1, mx.int32), np.zeros(1, int))
    assert np.array(changed)[0, 1] == np.float32(8.001)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_stays_broken(bad: float):
    for params in (
        SamplingParams(repetition_penalty=2.0),
        SamplingParams(logit_bias={0: 1}),
        SamplingParams(allowed_token_ids=(0, 3)),
    ):
        text = make_sequence(0, params, [3])
        logits = np.zeros((1, VOCABULARY), np.float32)
        logits[0, 3] = bad
        changed = apply(LogitProcessors(), logits, [text], [3])[0]
        assert not np.isfinite(changed.max())


def test_many_biases_and_rows_with_penalties_stay_within_one_row_of_counts_each():
    params = SamplingParams(logit_bias=dict.fromkeys(range(400), 0.5), repetition_penalty=1.1)
    texts = [make_sequence(seq_id, params, [1, 2, 3]) for seq_id in range(5)]
    processors = LogitProcessors()
    logits = np.zeros((5, 500), np.float32)
    changed = apply(processors, logits, texts, [3] * 5)
    check(changed[4], logits[4], texts[4], [])
    assert processors._counts.table is not None
    assert processors._counts.table.shape == (8, 500)
    processors.drop([0, 1, 2])
    more = [make_sequence(seq_id, params, [4]) for seq_id in (5, 6, 7, 8, 9, 10)]
    changed = apply(processors, np.zeros((6, 500), np.float32), more, [4] * 6)
    check(changed[5], logits[0], more[5], [])
    assert processors._counts.table.shape == (8, 500)
    processors.clear()
    assert processors._counts.table is None
