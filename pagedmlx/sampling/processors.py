"""LogitProcessors: what a request's settings add to, take from and forbid in its logits.

They come before the sampler and change the most likely token too. The order is vLLM's:

1. ``allowed_token_ids``: all other tokens are forbidden;
2. ``bad_words``: the token that would complete one is forbidden;
3. ``min_tokens``: before it, the tokens that end the output are forbidden;
4. ``logit_bias`` is added;
5. ``repetition_penalty``, then ``frequency_penalty`` and ``presence_penalty``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from pagedmlx.core.sequence import Sequence as TextSequence
from pagedmlx.sampling.counts import IN_PROMPT, TokenCounts
from pagedmlx.sampling.rows import put_rows, take_rows, upload_together
from pagedmlx.sampling.sampler import SampleRow

_Floats = np.ndarray
_Ints = np.ndarray


class LogitProcessors:
    """Changes the logits of the rows whose requests ask for it; the others stay untouched.

    It keeps what it knows of a sequence until ``drop``. After each ``apply`` the tokens that were
    sampled from its result are given to ``sampled``.
    """

    def __init__(self) -> None:
        self._counts = TokenCounts()
        # By sequence: its biases do not change, and may be many.
        self._biases: dict[int, tuple[_Ints, _Floats]] = {}
        self._to_count: tuple[list[int], list[TextSequence], mx.array] | None = None

    def apply(
        self, logits: mx.array, rows: Sequence[SampleRow], token_ids: mx.array, places: _Ints
    ) -> mx.array:
        """Build the graph of the changed logits; nothing is evaluated.

        Args:
            logits: (R, V) of any floating type.
            rows: The R rows' settings.
            token_ids: (T,) int32; the tokens that the step computes.
            places: (R,); which of them is each row's newest token.

        Returns:
            (R, V); ``logits`` itself where no row asks for a change, else float32.
        """
        assert len(rows) == logits.shape[0]
        self._to_count = None
        changed = [index for index, row in enumerate(rows) if _is_changed(row)]
        if not changed:
            return logits
        logits = logits.astype(mx.float32)
        members = [(rows[index], _sequence_of(rows[index])) for index in changed]
        part = take_rows(logits, changed)
        part = _only_allowed(part, members)
        part = self._add(part, members, token_ids, places[changed])
        part = self._penalise(part, members, changed)
        return put_rows(logits, changed, part)

    def sampled(self, tokens: mx.array) -> list[mx.array]:
        """Take in the tokens that were sampled from the last result of ``apply``.

        Args:
            tokens: (R,) int32.

        Returns:
            Arrays to be evaluated with the step.
        """
        if self._to_count is None:
            return []
        places, sequences, rows = self._to_count
        self._counts.add(sequences, rows, take_rows(tokens, places))
        assert self._counts.table is not None
        return [self._counts.table]

    def drop(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that ended or lost their blocks."""
        seq_ids = list(seq_ids)
        self._counts.drop(seq_ids)
        for seq_id in seq_ids:
            self._biases.pop(seq_id, None)

    def clear(self) -> None:
        """Forget all sequences."""
        self._counts = TokenCounts()
        self._biases.clear()
        self._to_count = None

    def _add(
        self,
        logits: mx.array,
        members: list[tuple[SampleRow, TextSequence]],
        token_ids: mx.array,
        places: _Ints,
    ) -> mx.array:
        """Add biases, and minus infinity to what is forbidden."""
        rows: list[_Ints] = []
        tokens: list[_Ints] = []
        values: list[_Floats] = []
        # What is forbidden only after one token: row, token, where the newest is, the one token.
        after: list[tuple[int, int, int, int]] = []
        for index, (row, sequence) in enumerate(members):
            forbidden: set[int] = set()
            if sequence.request.bad_words:
                for token, wanted in _completions(sequence, row.position):
                    if wanted is None:
                        forbidden.add(token)
                    else:
                        after.append((index, token, int(places[index]), wanted))
            if _lacks_tokens(row, sequence):
                forbidden |= sequence.request.stop_token_ids
            if forbidden:
                rows.append(np.full(len(forbidden), index))
                tokens.append(np.array(sorted(forbidden)))
                values.append(np.full(len(forbidden), -math.inf, np.float32))
            if row.params.logit_bias:
                biased, biases = self._bias_of(sequence)
                rows.append(np.full(len(biased), index))
                tokens.append(biased)
                values.append(biases)
        if rows:
            at, token, value = upload_together(
                np.concatenate(rows), np.concatenate(tokens), np.concatenate(values)
            )
            logits = logits.at[at, token].add(value)
        if after:
            at, token, newest, wanted = upload_together(*np.array(after).T)
            value = mx.where(token_ids[newest] == wanted, -mx.inf, 0.0)
            logits = logits.at[at, token].add(value)
        return logits

    def _bias_of(self, sequence: TextSequence) -> tuple[_Ints, _Floats]:
        kept = self._biases.get(sequence.seq_id)
        if kept is None:
            tokens, biases = zip(*sequence.request.params.logit_bias, strict=True)
            kept = np.array(tokens), np.array(biases, np.float32)
            self._biases[sequence.seq_id] = kept
        return kept

    def _penalise(
        self,
        logits: mx.array,
        members: list[tuple[SampleRow, TextSequence]],
        changed: list[int],
    ) -> mx.array:
        penalised = [index for index, (row, _) in enumerate(members) if row.params.has_penalties]
        if not penalised:
            return logits
        sequences = [members[index][1] for index in penalised]
        params = [members[index][0].params for index in penalised]
        found = self._counts.find(
            sequences, [members[index][0].position for index in penalised], logits.shape[1]
        )
        rows, *settings = upload_together(
            found,
            np.array([each.repetition_penalty for each in params], np.float32),
            np.array([each.frequency_penalty for each in params], np.float32),
            np.array([each.presence_penalty for each in params], np.float32),
        )
        self._to_count = [changed[index] for index in penalised], sequences, rows
        table = self._counts.table
        assert table is not None
        part = _penalised(take_rows(logits, penalised), table[rows], *settings)
        return put_rows(logits, penalised, part)


# Compiled, so that their constants are brought to the device once, and for few launches.
@mx.compile
def _penalised(
    logits: mx.array,
    counts: mx.array,
    repetition: mx.array,
    frequency: mx.array,
    presence: mx.array,
) -> mx.array:
    times = counts & (IN_PROMPT - 1)
    repetition = repetition[:, None]
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(counts > 0, repeated, logits)
    return logits - frequency[:, None] * times - presence[:, None] * (times > 0)


def _only_allowed(logits: mx.array, members: list[tuple[SampleRow, TextSequence]]) -> mx.array:
    limited = [
        index for index, (row, _) in enumerate(members) if row.params.allowed_token_ids is not None
    ]
    if not limited:
        return logits
    allowed = [np.array(members[index][0].params.allowed_token_ids) for index in limited]
    places = np.repeat(np.arange(len(limited)), [len(each) for each in allowed])
    at, token = upload_together(places, np.concatenate(allowed))
    part = take_rows(logits, limited)
    kept = mx.full(part.shape, -mx.inf)
    kept[at, token] = part[at, token]
    # What is broken must stay so, to be noticed.
    part = mx.where(mx.isnan(part).any(axis=-1, keepdims=True), mx.nan, kept)
    return put_rows(logits, limited, part)


def _completions(sequence: TextSequence, position: int) -> Iterable[tuple[int, int | None]]:
    """The last tokens of the bad words that the output ends with, but for its newest token.

    Yields:
        The token, and the newest token with which it would complete the word; None if any does.
    """
    # The newest token may be known to the device only; those before it are known here.
    newest = position - 1
    for word in sequence.request.bad_words:
        start = newest - (len(word) - 2)
        if len(word) == 1:
            yield word[0], None
        elif start >= sequence.num_prompt_tokens and (
            tuple(sequence.token_ids[start:newest]) == word[:-2]
        ):
            yield word[-1], word[-2]


def _is_changed(row: SampleRow) -> bool:
    params = row.params
    return bool(
        params.logit_bias
        or params.bad_words
        or params.allowed_token_ids is not None
        or params.has_penalties
        or (params.min_tokens and _lacks_tokens(row, _sequence_of(row)))
    )


def _lacks_tokens(row: SampleRow, sequence: TextSequence) -> bool:
    if sequence.request.grammar is not None:
        return False  # its masks see to it, since they know what else is left
    return row.position - sequence.num_prompt_tokens < row.params.min_tokens


def _sequence_of(row: SampleRow) -> TextSequence:
    assert row.sequence is not None, "these settings look at the text so far"
    return row.sequence
