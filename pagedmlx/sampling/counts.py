"""TokenCounts: which tokens each text has and how often, on the device, for the penalties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from pagedmlx.core.sequence import Sequence as TextSequence
from pagedmlx.sampling.rows import upload_together

IN_PROMPT = 1 << 24
"""Added to a token's count when it is in the prompt; far above any number of output tokens."""

_MIN_ROWS = 4


class TokenCounts:
    """One row of counts for every sequence with penalties, for as long as it has blocks.

    A sequence's row is made from its tokens when they are all known to the host: at its first
    token, and when it resumes after it lost its blocks. From then on the device adds each token
    that it samples, so that nothing here waits for the host to read it.

    Attributes:
        table: (N, V) int32; how often the output has each token, plus ``IN_PROMPT``. None while
            no sequence has a row. N is a power of two times 4.
    """

    def __init__(self) -> None:
        self.table: mx.array | None = None
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._lengths: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def find(
        self, sequences: Sequence[TextSequence], positions: Sequence[int], vocabulary: int
    ) -> list[int]:
        """Rows of the table that count each sequence's first ``position`` tokens.

        Args:
            sequences: Those that are about to sample.
            positions: How many tokens each has; one of them may be known to the device only.
            vocabulary: V.
        """
        new = [
            (sequence, position)
            for sequence, position in zip(sequences, positions, strict=True)
            if self._lengths.get(sequence.seq_id) != position
        ]
        if new:
            for sequence, position in new:
                if sequence.seq_id not in self._rows:
                    self._rows[sequence.seq_id] = self._free_row(vocabulary)
                self._lengths[sequence.seq_id] = position
            self._fill(new, vocabulary)
        return [self._rows[sequence.seq_id] for sequence in sequences]

    def add(self, sequences: Iterable[TextSequence], rows: mx.array, tokens: mx.array) -> None:
        """Count the tokens that were just sampled for the sequences in these rows."""
        assert self.table is not None
        # A row without a valid token ends its sequence; any token will do.
        self.table = self.table.at[rows, mx.maximum(tokens, 0)].add(1)
        for sequence in sequences:
            self._lengths[sequence.seq_id] += 1

    def drop(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that ended or lost their blocks; the last one takes the table along."""
        for seq_id in seq_ids:
            row = self._rows.pop(seq_id, None)
            if row is not None:
                del self._lengths[seq_id]
                self._free.append(row)
        if not self._rows:
            self.table = None
            self._free.clear()

    def _free_row(self, vocabulary: int) -> int:
        if not self._free:
            old = self.table
            num_old = 0 if old is None else old.shape[0]
            num_more = num_old or _MIN_ROWS
            more = mx.zeros((num_more, vocabulary), mx.int32)
            self.table = more if old is None else mx.concatenate([old, more])
            self._free.extend(reversed(range(num_old, num_old + num_more)))
        return self._free.pop()

    def _fill(self, new: list[tuple[TextSequence, int]], vocabulary: int) -> None:
        prompts: dict[str, np.ndarray] = {}  # the outputs of a request share it
        places: list[np.ndarray] = []
        tokens: list[np.ndarray] = []
        counts: list[np.ndarray] = []
        for place, (sequence, position) in enumerate(new):
            assert sequence.num_tokens >= position, "only the device knows its last token"
            request = sequence.request
            if request.request_id not in prompts:
                prompts[request.request_id] = np.unique(np.array(request.prompt_token_ids))
            prompt = prompts[request.request_id]
            output = np.array(sequence.token_ids[sequence.num_prompt_tokens : position], np.int64)
            output, times = np.unique(output, return_counts=True)
            tokens += [prompt, output]
            counts += [np.full(len(prompt), IN_PROMPT), times]
            places.append(np.full(len(prompt) + len(output), place))
        at, token, count, rows = upload_together(
            np.concatenate(places),
            np.concatenate(tokens),
            np.concatenate(counts),
            [self._rows[sequence.seq_id] for sequence, _ in new],
        )
        fresh = mx.zeros((len(new), vocabulary), mx.int32).at[at, token].add(count)
        table = self.table
        assert table is not None
        table[rows] = fresh
        self.table = table
