"""GrammarMasks: follows each sequence's grammar and finds its masks, beside the engine's thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedmlx.core.sequence import Sequence as TextSequence
from pagedmlx.core.structured import GrammarMatcher
from pagedmlx.errors import NoTokenLeftError, first_line

_Mask = npt.NDArray[np.uint32]
_NUM_THREADS = 4


@dataclass(eq=False, slots=True)
class _State:
    """One sequence's matcher behind ``num_tokens`` output tokens; ``mask`` once it was begun."""

    matcher: GrammarMatcher
    num_tokens: int = 0
    mask: Future[_Mask] | None = None


class GrammarMasks:
    """The masks of the sequences that follow a grammar.

    A mask is begun when the token before it is read, on a thread of its own, and waited for when
    the next step's graph is built. A state that was dropped is made anew from the output so far.
    """

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}
        self._pool: ThreadPoolExecutor | None = None

    def masks(self, sequences: Sequence[TextSequence], vocabulary: int) -> npt.NDArray[np.uint32]:
        """Which of V tokens each sequence may go on with; all its tokens are known.

        Returns:
            (R, ceil(V / 32)); a row of zeros where none may, ``advance`` tells why.
        """
        begun = [self._begin(self._state_of(sequence)) for sequence in sequences]
        masks = np.zeros((len(sequences), -(-vocabulary // 32)), np.uint32)
        for row, sequence, future in zip(masks, sequences, begun, strict=True):
            with suppress(NoTokenLeftError):
                row[:] = _without_ends(future.result(), sequence)
        return masks

    def advance(
        self, sampled: Iterable[tuple[TextSequence, int]]
    ) -> tuple[frozenset[int], dict[int, NoTokenLeftError]]:
        """Take in what was sampled for sequences, before it is part of their text.

        Returns:
            The ids of those that nothing may follow, and why others can't go on.
        """
        ended: set[int] = set()
        problems: dict[int, NoTokenLeftError] = {}
        for sequence, token_id in sampled:
            if sequence.is_finished:
                continue
            state = self._states.get(sequence.seq_id)
            try:
                if state is None:  # it lost its blocks; whether it ends matters all the same
                    state = _replay(sequence)
                if state.mask is not None:
                    state.mask.result()
                if token_id >= 0 and state.matcher.advance(token_id):
                    ended.add(sequence.seq_id)
            except NoTokenLeftError as error:
                problems[sequence.seq_id] = error
                continue
            state.num_tokens += 1
            state.mask = None
            if sequence.seq_id in self._states and sequence.seq_id not in ended and token_id >= 0:
                self._begin(state)
        return frozenset(ended), problems

    def drop(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that ended or lost their blocks."""
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)

    def clear(self) -> None:
        """Forget all sequences and let the threads end."""
        self._states.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def _state_of(self, sequence: TextSequence) -> _State:
        state = self._states.get(sequence.seq_id)
        if state is None:
            state = self._states[sequence.seq_id] = _replay(sequence)
        assert state.num_tokens == sequence.num_output_tokens
        return state

    def _begin(self, state: _State) -> Future[_Mask]:
        if state.mask is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_NUM_THREADS, "pagedmlx-mask")
            state.mask = self._pool.submit(_find, state.matcher)
        return state.mask


class _Broken:
    """Stands for a matcher that can't go on."""

    def __init__(self, problem: NoTokenLeftError) -> None:
        self._problem = problem

    def mask(self) -> _Mask:
        """Tell why."""
        raise self._problem

    def advance(self, token_id: int) -> bool:
        """Tell why."""
        raise self._problem


def _replay(sequence: TextSequence) -> _State:
    grammar = sequence.request.grammar
    assert grammar is not None
    matcher = grammar.start()
    try:
        for token_id in sequence.output_token_ids:
            matcher.advance(token_id)
    except NoTokenLeftError as problem:
        matcher = _Broken(problem)
    return _State(matcher, sequence.num_output_tokens)


def _find(matcher: GrammarMatcher) -> _Mask:
    """A mask; whatever goes wrong ends the one request."""
    try:
        return matcher.mask()
    except NoTokenLeftError:
        raise
    except BaseException as error:  # Rust's panics are no Exceptions
        raise NoTokenLeftError(f"the grammar can't go on: {first_line(error)}") from error


def _without_ends(mask: _Mask, sequence: TextSequence) -> _Mask:
    """A mask without the tokens that may not end the output yet, as long as others are left."""
    request = sequence.request
    if sequence.num_output_tokens < request.params.min_tokens:
        forbidden = request.stop_token_ids
    elif request.params.ignore_eos:
        forbidden = request.stop_token_ids - frozenset(request.params.stop_token_ids)
    else:
        return mask
    cut = mask.copy()
    for token_id in forbidden:
        cut[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return cut if cut.any() else mask
