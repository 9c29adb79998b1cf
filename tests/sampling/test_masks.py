"""Masks of sequences that come, go and lose their blocks; and how they are laid over logits."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.sequence import Sequence, SequenceStatus
from pagedmlx.core.step import INVALID_TOKEN
from pagedmlx.sampling.chooser import _only_masked
from pagedmlx.sampling.free_text import to_mask
from pagedmlx.sampling.masks import GrammarMasks
from pagedmlx.sampling.sampler import Sampler, SampleRow
from tests.support.grammars import ListGrammar, allowed
from tests.support.sampling import make_sequence

VOCABULARY = 70
END = 2
GRAMMAR = ListGrammar([[10, 11], [10, 40, 69], [33]], vocab_size=VOCABULARY, ends=[END])
OPEN = ListGrammar([[5], [5, 6]], vocab_size=VOCABULARY, ends=[END, 3])


def following(
    grammar: ListGrammar, output: Iterable[int] = (), seq_id: int = 0, **params: Any
) -> Sequence:
    stops = [END, 3, *params.get("stop_token_ids", ())]
    sequence = make_sequence(seq_id, SamplingParams(**params), [1], output, stop_token_ids=stops)
    sequence.request = replace(sequence.request, grammar=grammar)
    return sequence


def mask_of(masks: GrammarMasks, *sequences: Sequence) -> list[list[int]]:
    return [allowed(row) for row in masks.masks(sequences, VOCABULARY)]


def grow(masks: GrammarMasks, sequence: Sequence, token: int) -> tuple[bool, bool]:
    """Sample a token; whether the output is whole, and whether it can't go on."""
    ended, problems = masks.advance([(sequence, token)])
    sequence.token_ids.append(token)
    return sequence.seq_id in ended, sequence.seq_id in problems


def test_each_sequence_goes_its_own_way():
    masks = GrammarMasks()
    first, second = following(GRAMMAR), following(GRAMMAR, seq_id=1)
    assert mask_of(masks, first, second) == [[10, 33], [10, 33]]
    assert grow(masks, first, 10) == (False, False)
    assert grow(masks, second, 33) == (True, False)
    assert mask_of(masks, first) == [[11, 40]]
    assert grow(masks, first, 40) == (False, False)
    assert grow(masks, first, 69) == (True, False)


def test_what_was_dropped_is_made_anew_from_the_output():
    masks = GrammarMasks()
    sequence = following(GRAMMAR)
    mask_of(masks, sequence)
    grow(masks, sequence, 10)
    masks.drop([0])
    assert masks._states == {}
    assert mask_of(masks, sequence) == [[11, 40]]
    grow(masks, sequence, 40)
    # It loses its blocks while a step that samples its last token is under way.
    masks.drop([0])
    assert grow(masks, sequence, 69) == (True, False)
    assert masks._states == {}


def test_nothing_is_kept_of_a_sequence_that_ended_while_its_step_was_under_way():
    masks = GrammarMasks()
    sequence = following(GRAMMAR)
    mask_of(masks, sequence)
    sequence.status = SequenceStatus.FINISHED
    masks.drop([0])
    assert masks.advance([(sequence, 10)]) == (frozenset(), {})
    assert masks._states == {}


def test_a_grammar_that_breaks_ends_its_own_sequence_only():
    masks = GrammarMasks()
    bad = following(ListGrammar([[10, 10, 10]], vocab_size=VOCABULARY, bad=10))
    good = following(GRAMMAR, seq_id=1)
    mask_of(masks, bad, good)
    assert grow(masks, bad, 10) == (False, False)
    assert grow(masks, good, 10) == (False, False)
    assert mask_of(masks, bad, good) == [[], [11, 40]]
    assert grow(masks, bad, INVALID_TOKEN) == (False, True)
    assert grow(masks, following(GRAMMAR, seq_id=2), 50) == (False, True)


def test_an_output_that_the_grammar_never_allowed_is_a_problem_of_its_own():
    masks = GrammarMasks()
    sequence = following(GRAMMAR, [11])
    assert mask_of(masks, sequence) == [[]]
    assert grow(masks, sequence, INVALID_TOKEN) == (False, True)


def test_a_matcher_that_fails_in_some_way_of_its_own_ends_one_request(monkeypatch: Any):
    def fail(self: Any) -> Any:
        raise ZeroDivisionError("oh")

    masks = GrammarMasks()
    sequence = following(GRAMMAR)
    monkeypatch.setattr(type(GRAMMAR.start()), "mask", fail)
    assert mask_of(masks, sequence) == [[]]
    assert grow(masks, sequence, INVALID_TOKEN) == (False, True)


def test_ends_are_not_allowed_too_early_unless_nothing_else_is_left():
    for params in ({"ignore_eos": True}, {"min_tokens": 9}):
        masks = GrammarMasks()
        sequence = following(OPEN, [5], **params)
        assert mask_of(masks, sequence) == [[6]]
        sequence = following(OPEN, [5, 6], 1, **params)
        assert mask_of(masks, sequence) == [[2, 3]]
    assert mask_of(GrammarMasks(), following(OPEN, [5])) == [[2, 3, 6]]


def test_a_stop_token_of_the_request_may_end_what_ignores_the_models_end():
    sequence = following(OPEN, [5], ignore_eos=True, stop_token_ids=(6,))
    assert mask_of(GrammarMasks(), sequence) == [[6]]
    sequence = following(OPEN, min_tokens=1, stop_token_ids=(5,))
    assert mask_of(GrammarMasks(), sequence) == [[5]]


def test_a_mask_is_begun_before_anybody_waits_for_it():
    begun = threading.Event()

    class Noting(ListGrammar):
        def start(self) -> Any:
            matcher = super().start()
            find = matcher.mask

            def mask() -> Any:
                if matcher.tokens:
                    begun.set()
                    assert threading.current_thread() is not threading.main_thread()
                return find()

            matcher.mask = mask
            return matcher

    masks = GrammarMasks()
    sequence = following(Noting([[10, 11]], vocab_size=VOCABULARY))
    mask_of(masks, sequence)
    grow(masks, sequence, 10)
    assert begun.wait(60)
    assert mask_of(masks, sequence) == [[11]]
    masks.clear()
    assert masks._states == {}
    assert mask_of(masks, sequence) == [[11]]


# Over logits.


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 70, 320])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_only_the_tokens_whose_bits_are_set_keep_their_logits(vocabulary: int, dtype: mx.Dtype):
    rng = np.random.default_rng(vocabulary)
    logits = mx.array(rng.standard_normal((5, vocabulary), np.float32)).astype(dtype)
    chosen = rng.random((5, vocabulary)) < 0.3
    packed = np.stack([to_mask(np.flatnonzero(row), [b""] * vocabulary) for row in chosen])
    found = _only_masked(logits, mx.array(packed))
    assert found.dtype == dtype
    expected = np.where(chosen, np.array(logits.astype(mx.float32)), -np.inf)
    np.testing.assert_array_equal(np.array(found.astype(mx.float32)), expected)


def test_broken_logits_and_empty_masks_leave_no_token():
    logits = mx.array([[1.0, float("nan"), 2.0], [1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    masks = mx.array(np.array([[0b101], [0], [0b101]], np.uint32))
    rows = [SampleRow(SamplingParams(temperature=t), 1, 0, 0) for t in (0.0, 1.0, 0.0)]
    tokens = Sampler().sample(_only_masked(logits, masks), rows)
    assert tokens.tolist() == [INVALID_TOKEN, INVALID_TOKEN, 2]
