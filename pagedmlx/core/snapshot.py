"""EngineSnapshot: who holds which block and who waits, at one moment; block map and server read it.

Made only when somebody asks. It goes through tables, not through blocks, so that a large pool costs
no more than what is in use.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedmlx.core.batch import Int32Array
from pagedmlx.core.block import NO_BLOCK
from pagedmlx.core.kv_manager import KVManager
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.stats import EngineStats

NOBODY = -1
"""Owner of a block that no sequence holds."""


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """One output of a request that runs or waits.

    Attributes:
        request_id: Its request.
        index: Which of the request's outputs.
        status: ``running``, ``waiting`` or ``preempted``.
        priority: Of its request.
        num_prompt_tokens: Tokens of the prompt.
        num_output_tokens: Tokens generated so far.
        num_computed_tokens: Tokens whose K and V are in the pool.
        num_cached_tokens: Tokens of the prompt that came from shared blocks.
        num_missing_blocks: Blocks that aren't there for it; 0 for one that runs or only waits for
            its turn.
        num_preemptions: How often it lost its blocks.
        block_ids: Its blocks in order, for each KV group; NO_BLOCK where a window has passed.
    """

    request_id: str
    index: int
    status: str
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_missing_blocks: int
    num_preemptions: int
    block_ids: tuple[Int32Array, ...]


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The blocks of one KV group; arrays by block id.

    Attributes:
        owners: (num_blocks,) int32; place in ``EngineSnapshot.sequences`` of the first sequence
            that holds a block, or ``NOBODY``.
        ref_counts: (num_blocks,) int32; how many sequences hold it.
        is_cached: (num_blocks,) bool; held by none, and kept for its content.
    """

    owners: Int32Array
    ref_counts: Int32Array
    is_cached: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Everything that there is to see at one moment.

    Attributes:
        stats: The counts.
        sequences: Running ones in their order, then waiting ones in theirs.
        pools: One for each KV group.
    """

    stats: EngineStats
    sequences: tuple[SequenceSnapshot, ...]
    pools: tuple[PoolSnapshot, ...]


def take_snapshot(
    stats: EngineStats, kv: KVManager, running: SequenceOf[Sequence], waiting: SequenceOf[Sequence]
) -> EngineSnapshot:
    """Look at every sequence and block.

    Args:
        stats: The counts at this moment.
        kv: The blocks.
        running: Sequences that hold blocks.
        waiting: Sequences that hold none.
    """
    seen = [_sequence(sequence, 0) for sequence in running]
    for sequence in waiting:
        missing = max(0, kv.num_blocks_short(sequence, kv.no_prefix()))
        seen.append(_sequence(sequence, missing))
    pools = tuple(_pool(kv, group, seen) for group in range(len(kv.groups)))
    return EngineSnapshot(stats, tuple(seen), pools)


def _sequence(sequence: Sequence, num_missing_blocks: int) -> SequenceSnapshot:
    return SequenceSnapshot(
        request_id=sequence.request.request_id,
        index=sequence.index,
        status=sequence.status.value,
        priority=sequence.request.priority,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=sequence.num_output_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_missing_blocks=num_missing_blocks,
        num_preemptions=sequence.num_preemptions,
        block_ids=tuple(table.as_array() for table in sequence.block_tables),
    )


def _pool(kv: KVManager, group: int, sequences: SequenceOf[SequenceSnapshot]) -> PoolSnapshot:
    pool = kv.pools[group]
    owners = np.full(pool.num_blocks, NOBODY, np.int32)
    ref_counts = np.zeros(pool.num_blocks, np.int32)
    # Backwards, so that the first holder's place is what stays.
    for place in range(len(sequences) - 1, -1, -1):
        block_ids = sequences[place].block_ids[group]
        block_ids = block_ids[block_ids != NO_BLOCK]
        owners[block_ids] = place
        ref_counts[block_ids] += 1
    return PoolSnapshot(owners, ref_counts, pool.is_cached)
