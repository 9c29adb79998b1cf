from __future__ import annotations

import mlx.core as mx
import pytest

from pagedmlx.core.request import Request
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.sequence import Sequence
from pagedmlx.kv.states import States, StateStore


def sequences(count: int, n: int = 1, num_prompt_tokens: int = 4) -> list[Sequence]:
    """Outputs of one request if ``n`` says so, else of as many requests."""
    prompt = tuple(range(num_prompt_tokens))
    return [
        Sequence(
            seq_id=index,
            request=Request("all" if n > 1 else str(index), prompt, SamplingParams(n=n)),
            index=index,
            token_ids=list(prompt),
            block_tables=(),
        )
        for index in range(count)
    ]


def states(*values: float) -> States:
    """One layer with one array that says which sequence it belongs to, and one never put."""
    return States(((mx.array(values)[:, None], None),))


def values(taken: States | None) -> list[float]:
    assert taken is not None
    array, nothing = taken.layers[0]
    assert array is not None
    assert nothing is None
    return array[:, 0].tolist()


def test_sequences_at_their_beginning_have_no_state() -> None:
    store = StateStore()
    assert store.take(sequences(2), [0, 0]) is None


def test_each_sequence_gets_its_own_row_back_in_any_company() -> None:
    store, (a, b, c) = StateStore(), sequences(3)
    store.put([a, b], [4, 4], states(1, 2))
    store.put([c], [4], states(3))
    assert values(store.take([c, b, a], [4, 4, 4])) == [3, 2, 1]
    assert values(store.take([b], [4])) == [2]


def test_a_batch_that_goes_on_unchanged_is_handed_on_as_it_is() -> None:
    store, pair = StateStore(), sequences(2)
    put = states(1, 2)
    store.put(pair, [4, 4], put)
    taken = store.take(pair, [4, 4])
    assert taken is not None
    assert taken.layers[0][0] is put.layers[0][0]


def test_beside_others_a_beginning_is_zero() -> None:
    store, (a, b) = StateStore(), sequences(2)
    store.put([a], [4], states(1))
    assert values(store.take([a, b], [4, 0])) == [1, 0]


def test_a_sequence_that_begins_again_has_lost_its_state() -> None:
    store, (a,) = StateStore(), sequences(1)
    store.put([a], [4], states(1))
    assert store.take([a], [0]) is None
    assert len(store) == 0


def test_outputs_fork_from_the_state_before_the_last_token_of_their_prompt() -> None:
    store, (a, b, c) = StateStore(), sequences(3, n=3)
    store.put([a], [3], states(1))
    assert values(store.take([b], [3])) == [1]
    store.put([a], [4], states(9))
    # A has gone on since; C still starts from the prompt.
    assert values(store.take([c, a], [3, 4])) == [1, 9]


def test_a_prompt_lives_as_long_as_one_of_its_outputs() -> None:
    store, (a, b, c) = StateStore(), sequences(3, n=3)
    store.put([a], [3], states(1))
    store.take([b], [3])
    store.drop([0])
    assert values(store.take([c], [3])) == [1]
    store.drop([1, 2])
    assert len(store) == 0
    with pytest.raises(KeyError):
        store.take([a], [3])


def test_what_was_put_is_handed_out_once_to_be_evaluated() -> None:
    store, pair = StateStore(), sequences(2)
    store.put(pair, [4, 4], states(1, 2))
    assert [array.tolist() for array in store.take_pending()] == [[[1.0], [2.0]]]
    assert store.take_pending() == []
