"""The plan that decode and merge follow: which tokens of which sequence each threadgroup takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedmlx.core.batch import Int32Array

HEADER = 8
ITEM = 8
MERGE_ROW = 8
MIN_CHUNK = 64
MAX_CHUNK = 2048
SHORT = 512
"""Sequences up to here are better left whole than merged once they fill an eighth of the device;
up to twice as long ones where they fill more."""
LONG = 256
"""Fewer tokens are no work for threadgroups that are more than twice as wide."""
FULL = 0.9
"""Sequences of any length are left whole, too, where so much of the device is busy until all
end: on an H200 16 x 4096 took 69 microseconds instead of 74, and 30 x 2048 66 instead of 72.
Nobody has measured it on Metal."""
UNLIMITED = 1 << 30
"""More tokens than there are: no window, or no cut."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """A plan in the form of ``decode.metal``.

    Attributes:
        plan: int32, as the kernels read it.
        num_items: Work items that the grid must have room for.
        num_rows: Rows of the output.
        max_chunks: Items of the sequence that has most; 1 leaves nothing to merge.
    """

    plan: Int32Array
    num_items: int
    num_rows: int
    max_chunks: int

    @property
    def merge_rows(self) -> Int32Array:
        """The merge list: a view, (num_rows, MERGE_ROW)."""
        first = int(self.plan[2])
        rows = self.plan[first : first + MERGE_ROW * self.num_rows]
        return rows.reshape(self.num_rows, MERGE_ROW)


def choose_chunk(
    lows: Int32Array,
    ends: Int32Array,
    groups_per_item: int,
    wave: int,
    widths: Sequence[int] = (1,),
) -> int:
    """The shortest chunk whose threadgroups all run at once, a power of two; or whole sequences.

    Args:
        lows: (S,) first token that a sequence reads.
        ends: (S,) one past its last.
        groups_per_item: Threadgroups of one item.
        wave: Threadgroups that the device runs at once.
        widths: As for ``widest``.
    """
    lengths = ends - lows
    longest = int(lengths.max())
    num_groups = len(ends) * groups_per_item
    filled = num_groups * 8 / wave
    if filled >= 1 and longest <= SHORT * min(filled, 2):
        return UNLIMITED
    evenness = float(lengths.mean()) / max(longest, 1)
    num_groups *= widest(num_groups, longest, wave, widths)
    if num_groups * evenness >= FULL * wave * -(-num_groups // wave):
        return UNLIMITED
    chunk = MIN_CHUNK
    while chunk < MAX_CHUNK and _counts(lows, ends, chunk).sum() * groups_per_item > wave:
        chunk *= 2
    return chunk


def widest(num_groups: int, longest: int, wave: int, widths: Sequence[int]) -> int:
    """How many times as wide threadgroups should be that each attend a whole sequence.

    Args:
        num_groups: Threadgroups.
        longest: Tokens of the longest sequence.
        wave: Threadgroups of the usual width that the device runs at once.
        widths: How wide they can be, 1 among them.
    """
    fitting = (width for width in widths if width <= 2 or longest > LONG)
    return max(width for width in fitting if width == 1 or width * num_groups <= wave)


def fixed_chunks(lows: Int32Array, ends: Int32Array) -> npt.NDArray[np.int64]:
    """Chunks that depend on each sequence alone: about a sixteenth of it, 128 to 1024 tokens."""
    lengths = np.maximum(ends - lows, 1)
    return 1 << np.clip(np.ceil(np.log2(lengths / 16)), 7, 10).astype(np.int64)


def make_work_list(
    num_rows: Int32Array,
    lows: Int32Array,
    ends: Int32Array,
    block_tables: Int32Array,
    chunks: int | npt.NDArray[np.int64],
    window: int | None,
    num_padding: int = 0,
) -> WorkList:
    """Cut the tokens [low, end) of every sequence at multiples of its chunk.

    Args:
        num_rows: (S,) rows of each sequence, which lie one after the other.
        lows: (S,) first token that any row of a sequence sees.
        ends: (S,) one past the last.
        block_tables: (S, B); negative where there is none.
        chunks: Tokens of a chunk, or (S,) one for each sequence.
        window: Tokens that a row sees; None is all.
        num_padding: Rows behind them that nobody looks at: sequences without tokens.
    """
    num_seqs = len(num_rows)
    whose_table = np.arange(num_seqs)
    chunk = np.broadcast_to(chunks, (num_seqs,))
    if num_padding:
        behind = (0, num_padding)
        chunk = np.pad(chunk, behind, constant_values=1)
        num_rows = np.pad(num_rows, behind, constant_values=1)
        lows, ends = np.pad(lows, behind), np.pad(ends, behind)
        whose_table = np.pad(whose_table, behind)
        num_seqs += num_padding
    # Where there are no tokens there is an item nevertheless, to write the output.
    counts = np.maximum(_counts(lows, ends, chunk), 1)
    first_items = np.cumsum(counts) - counts
    first_rows = np.cumsum(num_rows) - num_rows
    num_items, total_rows = int(counts.sum()), int(num_rows.sum())
    owners = np.repeat(np.arange(num_seqs), counts)
    index = np.arange(num_items) - first_items[owners] + (lows // chunk)[owners]

    merge_at = HEADER + ITEM * num_items
    tables_at = merge_at + MERGE_ROW * total_rows
    width = block_tables.shape[1]
    plan = np.zeros(bucket(tables_at + block_tables.size, 4), dtype=np.int32)
    plan[:4] = num_items, UNLIMITED if window is None else window, merge_at, total_rows
    items = plan[HEADER:merge_at].reshape(num_items, ITEM)
    items[:, 0] = first_rows[owners]
    items[:, 1] = num_rows[owners]
    items[:, 2] = np.maximum(lows[owners], index * chunk[owners])
    items[:, 3] = np.minimum(ends[owners], (index + 1) * chunk[owners])
    items[:, 4] = ends[owners]
    items[:, 5] = tables_at + whose_table[owners] * width
    items[:, 6] = np.arange(num_items)
    rows = plan[merge_at:tables_at].reshape(total_rows, MERGE_ROW)
    row_owners = np.repeat(np.arange(num_seqs), num_rows)
    rows[:, 0] = first_items[row_owners]
    rows[:, 1] = counts[row_owners]
    rows[:, 2] = np.arange(total_rows) - first_rows[row_owners]
    tables = plan[tables_at : tables_at + block_tables.size]
    tables[:] = np.maximum(block_tables, 0).ravel()
    return WorkList(plan, bucket(num_items), total_rows, int(counts.max()))


def merge_list(merges: Int32Array) -> Int32Array:
    """A plan in which ``merge.metal`` finds nothing but its rows.

    Args:
        merges: (T, 3) for each row the first of its partial results, their number, its place.
    """
    plan = np.zeros(HEADER + MERGE_ROW * len(merges), dtype=np.int32)
    plan[2:4] = HEADER, len(merges)
    plan[HEADER:].reshape(-1, MERGE_ROW)[:, :3] = merges
    return plan


def idle_work_list(max_chunks: int) -> WorkList:
    """One item and one row with nothing to do, as of sequences of so many chunks."""
    plan = np.zeros(bucket(HEADER + ITEM + MERGE_ROW), dtype=np.int32)
    return WorkList(plan, 1, 1, max_chunks)


def bucket(count: int, num_steps: int = 8) -> int:
    """The count, rounded up, so that few sizes occur in a long run.

    Args:
        count: At least 0.
        num_steps: Sizes from one power of 2 to the next; itself one.
    """
    step = 1 << max(count.bit_length() - num_steps.bit_length(), 0)
    return -(-count // step) * step


def _counts(
    lows: Int32Array, ends: Int32Array, chunk: int | npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    return (ends - 1) // chunk - lows // chunk + 1
