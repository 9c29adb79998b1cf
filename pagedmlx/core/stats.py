"""EngineStats and RequestProgress: snapshots that chat, metrics and scripts read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine started, unless said otherwise.

    Block counts are of the fullest KV group. A slot is room for one token in a block.

    Attributes:
        block_size: Tokens in one block.
        num_blocks: Blocks in the pool.
        num_used_blocks: Blocks that live sequences hold now.
        num_cached_blocks: Blocks that are kept for their content now.
        num_free_blocks: Blocks that hold nothing of use now.
        num_shared_blocks: Blocks that more than one sequence holds now.
        peak_used_blocks: Most blocks in use at any time.
        num_running: Sequences running now.
        num_waiting: Sequences waiting now, preempted ones included.
        num_requests: Requests accepted.
        num_finished_requests: Requests whose every output has ended.
        num_waits: Sequences that ever had to wait because their blocks were not there.
        num_overtakes: How often a sequence was admitted before an earlier one that didn't fit.
        num_preemptions: How often a running sequence lost its blocks.
        num_deferrals: How often one waited a step for a block that another was computing.
        num_evictions: Cached blocks that were given up for others.
        num_copies: Blocks copied on write.
        num_steps: Steps scheduled.
        num_prompt_tokens: Tokens of all prompts, counted when their sequences were first admitted.
        num_cached_tokens: Those among them that came from shared blocks.
        num_computed_tokens: Tokens that went through the model.
        num_output_tokens: Tokens generated.
        waste_slots: Slots allocated to live sequences and not filled, now.
        max_waste_slots: Most unfilled slots that one sequence had after any step.
        num_waiting_steps: Steps in which some sequence waited for blocks.
        mean_fill_while_waiting: Used blocks over all blocks, mean over those steps; None when there
            were none.
        block_bytes: Bytes of one block over all groups and layers.
        pool_bytes: Bytes that the pool may take.
        allocated_bytes: Bytes that it takes now; more as its blocks come into use.
        state_bytes: Bytes set aside for recurrent states, beside the pool.
    """

    block_size: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_free_blocks: int = 0
    num_shared_blocks: int = 0
    peak_used_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_requests: int = 0
    num_finished_requests: int = 0
    num_waits: int = 0
    num_overtakes: int = 0
    num_preemptions: int = 0
    num_deferrals: int = 0
    num_evictions: int = 0
    num_copies: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    waste_slots: int = 0
    max_waste_slots: int = 0
    num_waiting_steps: int = 0
    mean_fill_while_waiting: float | None = None
    block_bytes: int = 0
    pool_bytes: int = 0
    allocated_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """Where one request in flight is; counts of tokens and blocks are of all its outputs.

    Attributes:
        request_id: The request.
        state: ``waiting``, ``prefill``, ``decode``, or ``preempted`` when it waits again.
        age_s: Since it arrived.
        priority: Larger is served first.
        num_outputs: How many outputs it has.
        num_prompt_tokens: Tokens of its prompt.
        num_cached_tokens: Those that came from shared blocks.
        num_computed_tokens: Tokens whose K and V the first unfinished output has in the pool.
        num_output_tokens: Tokens generated so far.
        num_blocks: Blocks that it holds, shared ones counted once.
        num_preemptions: How often one of its outputs lost its blocks.
    """

    request_id: str
    state: str
    age_s: float
    priority: int
    num_outputs: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_preemptions: int
