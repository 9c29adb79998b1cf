"""StateStore: the one owner of the recurrent states of all sequences.

A state can't be rolled back or shared from the middle of a text: whatever wants to go on from one
must go on from exactly the token after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np

from pagedmlx.core.sequence import Sequence as TextSequence


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class States:
    """The states of some sequences; a value, never changed in place.

    Attributes:
        layers: For each layer that keeps a state its arrays, each with one row for every
            sequence; None where the model has not put one yet.
    """

    layers: tuple[tuple[mx.array | None, ...], ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Row:
    """One sequence's state."""

    states: States
    row: int


class StateStore:
    """Keeps a state for every sequence that runs, and one of a prompt that outputs fork from.

    States that were computed together stay together, so that a batch which goes on unchanged is
    handed on without a copy.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        # A prompt's state lives as long as one of its request's sequences does.
        self._prompt_of: dict[int, _Row] = {}
        self._prompts: WeakValueDictionary[str, _Row] = WeakValueDictionary()
        self._pending: list[States] = []

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, sequences: Sequence[TextSequence], starts: Sequence[int]) -> States | None:
        """The states from which sequences go on; None if all of them are at their beginning.

        Args:
            sequences: Those that run together, in the order of their rows.
            starts: Position of the first token that each is about to compute. A sequence that
                starts in its text without a state of its own forks from its request's prompt.
        """
        found = [self._find(each, start) for each, start in zip(sequences, starts, strict=True)]
        some = next((each.states for each in found if each is not None), None)
        if some is None:
            return None
        parts: list[tuple[States | None, list[int]]] = []
        for each in found:
            states, row = (None, 0) if each is None else (each.states, each.row)
            if not parts or parts[-1][0] is not states:
                parts.append((states, []))
            parts[-1][1].append(row)
        return States(
            tuple(
                tuple(
                    None if like is None else _rows_of(parts, layer, index, like)
                    for index, like in enumerate(arrays)
                )
                for layer, arrays in enumerate(some.layers)
            )
        )

    def put(self, sequences: Sequence[TextSequence], ends: Sequence[int], states: States) -> None:
        """Keep what came out of a pass.

        Args:
            sequences: Those that ran together.
            ends: Position after the last token that each has computed. A state that leaves one
                token of a prompt to compute is kept for the prompt's other outputs too.
            states: Row i is the i-th sequence's.
        """
        for row, (sequence, end) in enumerate(zip(sequences, ends, strict=True)):
            seq_id, request = sequence.seq_id, sequence.request
            kept = self._rows[seq_id] = _Row(states, row)
            if request.params.n > 1 and end == len(request.prompt_token_ids) - 1:
                self._prompts[request.request_id] = self._prompt_of[seq_id] = kept
        self._pending.append(states)

    def drop(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that ended or lost their blocks."""
        for seq_id in seq_ids:
            self._rows.pop(seq_id, None)
            self._prompt_of.pop(seq_id, None)

    def clear(self) -> None:
        """Forget all sequences."""
        self._rows.clear()
        self._prompt_of.clear()

    def take_pending(self) -> list[mx.array]:
        """The arrays that were put since the last call: to be evaluated with the step."""
        pending, self._pending = self._pending, []
        return [
            array
            for states in pending
            for arrays in states.layers
            for array in arrays
            if array is not None
        ]

    def _find(self, sequence: TextSequence, start: int) -> _Row | None:
        seq_id, request = sequence.seq_id, sequence.request
        if start == 0:
            self.drop([seq_id])
            return None
        found = self._rows.get(seq_id)
        if found is None:
            found = self._prompt_of[seq_id] = self._prompts[request.request_id]
        return found


def _rows_of(
    parts: list[tuple[States | None, list[int]]], layer: int, index: int, like: mx.array
) -> mx.array:
    """Gather one array's rows; a sequence at its beginning has zeros, as in mlx-lm's batches."""
    found: list[mx.array] = []
    for states, rows in parts:
        array = None if states is None else states.layers[layer][index]
        if array is None:
            array = mx.zeros((len(rows), *like.shape[1:]), like.dtype)
        elif rows != list(range(len(array))):
            array = array[mx.array(np.array(rows, np.int32))]
        found.append(array)
    return found[0] if len(found) == 1 else mx.concatenate(found)
