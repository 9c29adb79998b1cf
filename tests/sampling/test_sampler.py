"""The sampler keeps to the filters' definition, to its seeds, and to one row at a time."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.step import INVALID_TOKEN
from pagedmlx.sampling.sampler import Sampler, SampleRow, sampling_key

VOCABULARY = 12
GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams()


def sample(logits: object, rows: list[SampleRow], narrow_width: int = 256) -> list[int]:
    tokens = Sampler(narrow_width).sample(mx.array(np.asarray(logits, np.float32)), rows)
    assert tokens.dtype == mx.int32
    return np.array(tokens).tolist()


def draw_many(
    logits: list[float], params: SamplingParams, count: int, narrow_width: int = 256
) -> np.ndarray:
    """How often each token comes in ``count`` draws at successive positions."""
    rows = [SampleRow(params, 3, 0, position) for position in range(count)]
    tokens = sample(np.tile(np.float32(logits), (count, 1)), rows, narrow_width)
    return np.bincount(tokens, minlength=len(logits))


def specified(logits: list[float], params: SamplingParams) -> np.ndarray:
    """The distribution that the settings ask for, written plainly and in float64."""
    scaled = np.array(logits, np.float64) / params.temperature
    likely = np.exp(scaled - scaled.max())
    likely /= likely.sum()
    order = np.argsort(-likely, kind="stable")
    kept = order if params.top_k <= 0 else order[: params.top_k]
    if params.top_p < 1.0:
        share = np.cumsum(likely[kept]) / likely[kept].sum()
        kept = kept[: int(np.searchsorted(share, params.top_p)) + 1]
    kept = kept[likely[kept] >= params.min_p * likely.max()]
    result = np.zeros_like(likely)
    result[kept] = likely[kept] / likely[kept].sum()
    return result


LOGITS = [0.3, 2.0, -1.0, 1.1, 0.0, 1.7, -3.0, 0.9, 2.3, -0.4, 1.4, -0.8]


@pytest.mark.parametrize("narrow_width", [4, 256])
@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=3),
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.93),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=4, top_p=0.7),
        SamplingParams(temperature=2.0, top_k=9, top_p=0.9, min_p=0.3),
        SamplingParams(top_k=0),
        SamplingParams(top_k=-1),
        SamplingParams(top_k=VOCABULARY + 50),
    ],
    ids=str,
)
def test_tokens_follow_the_filtered_distribution(params: SamplingParams, narrow_width: int):
    count = 6000
    expected = specified(LOGITS, params)
    seen = draw_many(LOGITS, params, count, narrow_width)
    assert not seen[expected == 0].any()
    # Six standard deviations; the draws are fixed by their seed, so this can't flicker.
    bound = 6 * np.sqrt(count * expected * (1 - expected)) + 1
    assert (np.abs(seen - count * expected) <= bound).all()


def test_equal_tokens_are_kept_by_smaller_id():
    flat = [1.0] * VOCABULARY
    for params, kept in (
        (SamplingParams(top_k=3), 3),
        (SamplingParams(top_p=0.5), 6),
        (SamplingParams(top_k=4, top_p=0.5), 2),
        (SamplingParams(min_p=1.0), VOCABULARY),
    ):
        for narrow_width in (4, 256):
            seen = draw_many(flat, params, 400, narrow_width)
            assert seen[:kept].all()
            assert not seen[kept:].any()


def test_the_smallest_top_p_keeps_the_most_likely_token():
    seen = draw_many(LOGITS, SamplingParams(top_p=1e-300), 50)
    assert seen[int(np.argmax(LOGITS))] == 50


def test_greedy_is_argmax_with_the_first_of_equals_whatever_else_is_set():
    logits = [[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-5.0, -4.0, -9.0, -4.0]]
    for params in (
        GREEDY,
        SamplingParams(temperature=0.0, top_k=2, top_p=0.1, min_p=0.9, seed=5),
        SamplingParams(temperature=7.0, top_k=1),
    ):
        rows = [SampleRow(params, seed, 0, 9) for seed in range(3)]
        assert sample(logits, rows) == [1, 0, 1]


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_flat():
    for tiny in (1e-9, 1e-300):
        assert draw_many(LOGITS, SamplingParams(temperature=tiny), 50)[8] == 50
    seen = draw_many(LOGITS, SamplingParams(temperature=100.0), 2400)
    assert (np.abs(seen - 200) < 90).all()


def test_tokens_with_logits_of_minus_infinity_never_come():
    logits = [-np.inf, 0.0, -np.inf, 0.0]
    for params in (PLAIN, SamplingParams(top_k=3), SamplingParams(top_p=0.99, min_p=0.01)):
        seen = draw_many(logits, params, 200)
        assert seen[[1, 3]].all()
        assert not seen[[0, 2]].any()


@pytest.mark.parametrize("params", [GREEDY, PLAIN, SamplingParams(top_k=2, top_p=0.5)], ids=str)
def test_a_broken_row_is_marked_and_its_neighbours_are_not_touched(params: SamplingParams):
    good = [0.5, 4.0, 1.0, 2.0]
    broken = [
        [0.5, np.nan, 1.0, 2.0],
        [np.nan, 4.0, 1.0, 2.0],
        [np.nan] * 4,
        [-np.inf] * 4,
        [0.0, np.inf, 1.0, 2.0],
    ]
    rows = [SampleRow(params, 1, 0, position) for position in range(6)]
    tokens = sample([good, *broken], rows)
    assert tokens[0] == sample([good], rows[:1])[0]
    assert tokens[1:] == [INVALID_TOKEN] * 5


def test_a_step_in_which_no_row_samples_gives_no_tokens():
    assert sample(np.zeros((0, VOCABULARY)), []) == []


def test_half_precision_logits_give_what_their_float32_values_give():
    for dtype in (mx.float16, mx.bfloat16):
        half = mx.array([LOGITS] * 40).astype(dtype)
        rows = [SampleRow(SamplingParams(top_p=0.9), 2, 0, position) for position in range(40)]
        expected = Sampler().sample(half.astype(mx.float32), rows)
        assert mx.array_equal(Sampler().sample(half, rows), expected)


def test_a_seed_gives_the_same_tokens_again_and_they_vary_by_position():
    flat = [[0.0] * 50] * 50
    rows = [SampleRow(PLAIN, 7, 0, position) for position in range(50)]
    tokens = sample(flat, rows)
    assert tokens == sample(flat, rows)
    assert len(set(tokens)) > 20


def test_seeds_and_choices_of_one_request_give_different_tokens():
    flat = [[0.0] * 50] * 30

    def text(seed: int, index: int) -> tuple[int, ...]:
        return tuple(sample(flat, [SampleRow(PLAIN, seed, index, at) for at in range(30)]))

    texts = [text(1, 0), text(1, 1), text(1, 2), text(2, 0), text(-1, 0), text(2**64 - 1, 0)]
    assert len(set(texts)) == len(texts)


def test_a_key_is_two_words_and_depends_on_each_part():
    keys = {
        sampling_key(seed, index, position)
        for seed in (-(2**63), -1, 0, 1, 11, 2**64 - 1)
        for index in (0, 1, 11)
        for position in (0, 1, 11, 10**7)
    }
    assert len(keys) == 6 * 3 * 4
    assert all(0 <= word < 2**32 for key in keys for word in key)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 3, 5, VOCABULARY, 999]),
    top_p=st.sampled_from([1e-6, 0.31, 0.83, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
# Few distinct values, so that ties are common; shares of equal tokens never meet top_p exactly.
ROWS = st.tuples(
    st.lists(st.sampled_from([-2.0, 0.0, 0.5, 1.0, 3.0]), min_size=12, max_size=12),
    st.builds(
        SampleRow,
        PARAMS,
        seed=st.integers(-(2**63), 2**64 - 1),
        index=st.integers(0, 63),
        position=st.integers(0, 10**6),
    ),
)


@given(batch=st.lists(ROWS, min_size=1, max_size=7), data=st.data())
def test_neighbours_and_order_never_change_a_rows_token(batch: list, data: st.DataObject):
    narrow_width = data.draw(st.sampled_from([2, 4, 256]))
    alone = [sample([logits], [row], narrow_width)[0] for logits, row in batch]
    order = data.draw(st.permutations(range(len(batch))))
    picked = order[: data.draw(st.integers(1, len(batch)))]
    together = sample(
        [batch[index][0] for index in picked], [batch[index][1] for index in picked], narrow_width
    )
    assert together == [alone[index] for index in picked]


@given(logits=ROWS.map(lambda pair: pair[0]), params=PARAMS, narrow_width=st.sampled_from([3, 256]))
def test_every_token_is_in_the_specified_support(
    logits: list[float], params: SamplingParams, narrow_width: int
):
    if params.is_greedy:
        allowed = {int(np.argmax(logits))}
    else:
        allowed = set(np.flatnonzero(specified(logits, params)).tolist())
    seen = draw_many(logits, params, 40, narrow_width)
    assert set(np.flatnonzero(seen).tolist()) <= allowed
