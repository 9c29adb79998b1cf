"""Tells from a request's sequences where it is, for those who watch the engine."""

from __future__ import annotations

from collections.abc import Sequence

from pagedmlx.core.sequence import Sequence as TextSequence
from pagedmlx.core.sequence import SequenceStatus
from pagedmlx.core.stats import RequestProgress


def request_progress(sequences: Sequence[TextSequence], age_s: float) -> RequestProgress:
    """Where the request of these sequences is; at least one of them has not finished."""
    request = sequences[0].request
    alive = [each for each in sequences if not each.is_finished]
    blocks = {
        (group, block.block_id)
        for each in alive
        for group, table in enumerate(each.block_tables)
        for block in table.blocks
    }
    return RequestProgress(
        request_id=request.request_id,
        state=_state(sequences, alive),
        age_s=age_s,
        priority=request.priority,
        num_outputs=len(sequences),
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=sequences[0].num_cached_tokens,
        num_computed_tokens=alive[0].num_computed_tokens,
        num_output_tokens=sum(each.num_output_tokens for each in sequences),
        num_blocks=len(blocks),
        num_preemptions=sum(each.num_preemptions for each in sequences),
    )


def _state(sequences: Sequence[TextSequence], alive: Sequence[TextSequence]) -> str:
    if any(each.status is SequenceStatus.RUNNING for each in alive):
        return "decode" if any(each.num_output_tokens for each in sequences) else "prefill"
    is_preempted = any(each.status is SequenceStatus.PREEMPTED for each in alive)
    return "preempted" if is_preempted else "waiting"
