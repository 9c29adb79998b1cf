from __future__ import annotations

import pytest

from pagedmlx.core.block import Block
from pagedmlx.core.kv_manager import KVManager
from pagedmlx.core.prefix import HashFunction, hash_tokens, pack_tokens
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.step import BlockCopy
from tests.support.core import (
    FULL,
    WINDOW,
    constant_hash,
    four_bit_hash,
    make_kv,
    make_request,
)

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)


def new_sequence(kv: KVManager, tokens: tuple[int, ...], *, salt: str = "") -> Sequence:
    return Sequence(0, make_request(tokens, cache_salt=salt), 0, list(tokens), kv.new_tables())


def num_cached(kv: KVManager, tokens: tuple[int, ...], *, salt: str = "") -> int:
    return kv.find_cached(new_sequence(kv, tokens, salt=salt)).num_tokens


def compute(kv: KVManager, tokens: tuple[int, ...], *, salt: str = "") -> Sequence:
    """A sequence whose every token has been through the model."""
    sequence = new_sequence(kv, tokens, salt=salt)
    kv.admit(sequence, kv.find_cached(sequence))
    finish_compute(kv, sequence)
    return sequence


def finish_compute(kv: KVManager, sequence: Sequence) -> None:
    num_tokens = sequence.num_tokens - sequence.num_computed_tokens
    assert kv.try_allocate(sequence, num_tokens) is not None
    sequence.num_computed_tokens = sequence.num_tokens
    kv.end_pending(sequence, sequence.num_tokens)
    kv.publish(sequence, sequence.num_tokens)


def fork(kv: KVManager, sibling: Sequence) -> Sequence:
    request = sibling.request
    twin = Sequence(1, request, 1, list(request.prompt_token_ids), kv.new_tables())
    kv.admit(twin, kv.find_forkable(twin, sibling))
    return twin


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_a_full_hit_leaves_at_least_the_last_token_to_compute(length: int) -> None:
    kv = make_kv()
    tokens = (A + B + C)[:length]
    kv.release(compute(kv, tokens))
    assert num_cached(kv, tokens) == (length - 1) // 4 * 4 < length


def test_recomputing_the_last_token_keeps_the_last_block_in_the_chain() -> None:
    kv = make_kv()
    for _ in range(3):
        kv.release(compute(kv, A + B))
    assert num_cached(kv, A + B + C) == 8


def test_blocks_that_are_cached_are_not_hashed_again() -> None:
    hashed: list[bytes] = []

    def noted(parent: bytes, tokens: bytes) -> bytes:
        hashed.append(tokens)
        return hash_tokens(parent, tokens)

    kv = make_kv(hash_function=noted)
    kv.release(compute(kv, A + B))
    first, hashed[:] = list(hashed), []
    again = compute(kv, A + B + C)
    assert first == [pack_tokens(A), pack_tokens(B)]
    assert hashed == [pack_tokens(C)]
    assert len(again.block_hashes) == len(set(again.block_hashes)) == 3
    kv.check_integrity([again])


def test_a_block_is_found_only_after_its_step_has_completed() -> None:
    kv = make_kv()
    sequence = new_sequence(kv, A + B)
    kv.admit(sequence, kv.find_cached(sequence))
    kv.try_allocate(sequence, 8)
    sequence.num_computed_tokens = 8
    other = new_sequence(kv, A + C)
    prefix = kv.find_cached(other)
    assert prefix.num_tokens == 0
    assert kv.is_pending(other, prefix)
    kv.publish(sequence, 8)
    kv.end_pending(sequence, sequence.num_tokens)
    prefix = kv.find_cached(other)
    assert prefix.num_tokens == 4
    assert not kv.is_pending(other, prefix)


def test_nobody_waits_for_a_block_whose_step_was_given_up() -> None:
    kv = make_kv()
    sequence = new_sequence(kv, A + B)
    kv.admit(sequence, kv.find_cached(sequence))
    kv.try_allocate(sequence, 8)
    kv.release(sequence)
    other = new_sequence(kv, A + B)
    assert not kv.is_pending(other, kv.find_cached(other))


def test_equal_blocks_after_unequal_ones_are_no_hit() -> None:
    kv = make_kv()
    kv.release(compute(kv, A + C))
    assert num_cached(kv, B + C + A) == 0
    assert num_cached(kv, A + C + B) == 8


@pytest.mark.parametrize("hash_function", [constant_hash, four_bit_hash])
def test_colliding_hashes_never_serve_another_prompt(hash_function: HashFunction) -> None:
    kv = make_kv(64, hash_function=hash_function)
    prompts = [(*block, *rest, 0) for block in (A, B, C) for rest in (A, B, C)]
    owners: dict[int, tuple[int, ...]] = {}
    for prompt in prompts:
        sequence = new_sequence(kv, prompt)
        prefix = kv.find_cached(sequence)
        for index, block in enumerate(prefix.blocks[0]):
            assert owners[block.block_id] == prompt[: 4 * (index + 1)]
        kv.admit(sequence, prefix)
        finish_compute(kv, sequence)
        for index, block in enumerate(sequence.block_tables[0].blocks):
            owners[block.block_id] = prompt[: 4 * (index + 1)]
        kv.release(sequence)
        kv.check_integrity([])


def test_an_evicted_block_is_never_found_again() -> None:
    kv = make_kv(6)
    kv.release(compute(kv, (*A, *B, *C, *A)))
    kv.release(compute(kv, (*C, *C, *C, *C, *C)))
    # X's first block is still there, the chain's tail went first.
    assert num_cached(kv, (*A, *B, *C, *A, 0)) == 4
    assert kv.pools[0].num_evictions == 3
    sequence = compute(kv, (*A, *B, *C, *A))
    kv.check_integrity([sequence])


def test_a_partial_hit_is_used_up_to_the_first_hole() -> None:
    kv = make_kv()
    kv.release(compute(kv, A + B + C))
    hole = kv.find_cached(new_sequence(kv, (*A, *B, *C, 0))).blocks[0][1]
    kv._cache.indexes[0].remove(hole)
    kv.pools[0].forget(hole)
    kv.check_integrity([])
    assert num_cached(kv, (*A, *B, *C, 0)) == 4


def test_reviving_a_cached_block_keeps_counts_and_others_apart() -> None:
    kv = make_kv(4)
    kv.release(compute(kv, A + B))
    again = compute(kv, (*A, *B, 0))
    big = new_sequence(kv, (*C, *A))
    prefix = kv.find_cached(big)
    assert kv.num_blocks_short(big, prefix) == 1
    assert kv.try_allocate(big, 8) is None
    kv.check_integrity([again])
    kv.release(again)
    assert kv.try_allocate(big, 8) == []
    big.num_computed_tokens = 8
    kv.check_integrity([big])


def test_cached_blocks_that_a_sequence_would_share_do_not_count_as_room() -> None:
    kv = make_kv(3)
    kv.release(compute(kv, A + B))
    sequence = new_sequence(kv, (*A, *B, 1, 2, 3, 4, 5))
    assert kv.num_blocks_short(sequence, kv.find_cached(sequence)) == 1


@pytest.mark.parametrize(
    ("salts", "request_salt"), [(("other model",), ""), (("model", "int8"), ""), (("model",), "x")]
)
def test_blocks_are_shared_only_where_every_salt_agrees(
    salts: tuple[str, ...], request_salt: str
) -> None:
    kv = make_kv(salts=("model",))
    kv.release(compute(kv, A + B))
    assert num_cached(kv, (*A, *B, 0)) == 8
    kv._cache._salts = salts
    assert num_cached(kv, (*A, *B, 0), salt=request_salt) == 0


def test_without_the_prefix_cache_nothing_is_kept_or_found() -> None:
    kv = make_kv(prefix_caching=False)
    kv.release(compute(kv, A + B))
    assert num_cached(kv, (*A, *B, 0)) == 0
    assert kv.pools[0].num_cached_blocks == 0


def test_room_is_made_before_the_write_that_needs_it() -> None:
    kv = make_kv(2)
    sequence = compute(kv, A)
    assert len(sequence.block_tables[0]) == 1
    sequence.token_ids.append(0)
    assert kv.try_allocate(sequence, 1) == []
    assert len(sequence.block_tables[0]) == 2


def test_an_allocation_that_fails_leaves_no_trace_in_any_group() -> None:
    kv = make_kv(3, groups=(FULL, WINDOW))
    sequence = compute(kv, A)
    # Only the second group lacks room.
    hoard = [kv.pools[1].allocate(), kv.pools[1].allocate()]
    sequence.token_ids += B
    assert kv.try_allocate(sequence, 4) is None
    assert [len(table) for table in sequence.block_tables] == [1, 1]
    assert kv.num_copies == 0
    assert not kv._cache._pending
    for block in hoard:
        kv.pools[1].free([block])
    kv.check_integrity([sequence])
    assert kv.try_allocate(sequence, 4) == []


def test_the_last_holder_of_a_fork_writes_in_place() -> None:
    kv = make_kv()
    first = compute(kv, (*A, 1, 2))
    second = fork(kv, first)
    kv.release(first)
    assert kv.try_allocate(second, 1) == []
    assert kv.num_copies == 0


def test_a_block_that_went_on_being_filled_by_its_sibling_is_copied() -> None:
    kv = make_kv()
    first = compute(kv, (*A, 1, 2))
    second = fork(kv, first)
    first.token_ids += [3, 4]
    copies = kv.try_allocate(first, 2)
    assert copies is not None
    assert len(copies) == 1
    assert kv.try_allocate(second, 1) == []


def test_writing_into_an_indexed_block_takes_it_out_of_the_index() -> None:
    """The sibling filled and published the shared block, then ended: its content is still named."""
    kv = make_kv(2)
    first = compute(kv, (*A, 5, 6))
    first.token_ids += [7, 8]
    finish_compute(kv, first)
    second = fork(kv, first)
    kv.release(first)
    assert num_cached(kv, (*A, *B, 0)) == 8
    assert kv.try_allocate(second, 1) == [], "there is no room for a copy"
    assert num_cached(kv, (*A, *B, 0)) == 4
    second.num_computed_tokens += 1
    kv.check_integrity([second])


def test_an_indexed_block_is_copied_before_it_is_written_where_there_is_room() -> None:
    kv = make_kv(3)
    first = compute(kv, (*A, 5, 6))
    first.token_ids += [7, 8]
    finish_compute(kv, first)
    second = fork(kv, first)
    kv.release(first)
    assert kv.try_allocate(second, 1) == [BlockCopy(0, 1, 2)]
    assert num_cached(kv, (*A, *B, 0)) == 8
    second.num_computed_tokens += 1
    kv.check_integrity([second])


# A cached block of which only the beginning is equal.


def found(kv: KVManager, tokens: tuple[int, ...], *, salt: str = "") -> tuple[int, list[int]]:
    """Tokens that a look-up finds, and the ids of their blocks in the first group."""
    prefix = kv.find_cached(new_sequence(kv, tokens, salt=salt))
    return prefix.num_tokens, [block.block_id for block in prefix.blocks[0]]


def test_the_beginning_of_a_cached_block_is_part_of_a_hit() -> None:
    kv = make_kv(min_partial_tokens=2)
    kv.release(compute(kv, (*A, *B, 0)))
    assert found(kv, (*A, 5, 6, 7, 0, 0)) == (7, [0, 1])
    assert found(kv, (*A, 5, 6, 0)) == (6, [0, 1])
    assert found(kv, (1, 2, 0, 0, 0)) == (2, [0])
    assert found(kv, (*A, 5, 0, 0)) == (4, [0]), "one token is not worth a copy"
    assert found(kv, (*A, 5, 6)) == (4, [0]), "the last token is never part of a hit"
    assert found(kv, (*C, 5, 6, 7)) == (0, []), "not behind another history"
    assert found(kv, (*A, 5, 6, 7, 0), salt="x") == (0, []), "nor under another salt"


def test_a_few_equal_tokens_are_not_worth_a_copy() -> None:
    kv = make_kv(block_size=8)
    kv.release(compute(kv, (*A, *B)))
    assert found(kv, (*A[:3], 0, 0, 0)) == (0, [])
    assert found(kv, (*A, 0, 0, 0)) == (4, [0])


def test_of_several_beginnings_the_longest_counts() -> None:
    kv = make_kv(16, min_partial_tokens=1)
    for tail in ((5, 6, 0, 0), (5, 6, 7, 1), (5, 7, 7, 7), (4, 6, 7, 8)):
        kv.release(compute(kv, (*A, *tail)))
    _, whole = found(kv, (*A, 5, 6, 7, 1, 0))
    assert found(kv, (*A, 5, 6, 7, 8, 9)) == (7, whole)


def test_a_beginning_is_copied_and_the_block_stays_what_it_was() -> None:
    kv = make_kv(min_partial_tokens=2)
    kv.release(compute(kv, A + B))
    sequence = new_sequence(kv, (*A, 5, 6, 0, 0, 0))
    kv.admit(sequence, kv.find_cached(sequence))
    assert sequence.num_computed_tokens == 6
    assert kv.try_allocate(sequence, 3) == [BlockCopy(0, 1, 2)]
    assert sequence.block_tables[0].as_array().tolist() == [0, 2, 3]
    sequence.num_computed_tokens = 9
    kv.end_pending(sequence, 9)
    kv.publish(sequence, 9)
    assert num_cached(kv, (*A, *B, 0)) == num_cached(kv, (*A, 5, 6, 0, 0, 0)) == 8
    kv.check_integrity([sequence])


def test_in_a_full_pool_a_beginning_is_taken_over_and_needs_no_room() -> None:
    kv = make_kv(2, min_partial_tokens=2)
    kv.release(compute(kv, A + B))
    sequence = new_sequence(kv, (*A, 5, 6, 0, 0))
    prefix = kv.find_cached(sequence)
    assert kv.num_blocks_short(sequence, prefix) == 0
    kv.admit(sequence, prefix)
    assert kv.try_allocate(sequence, 2) == []
    sequence.num_computed_tokens = 8
    kv.publish(sequence, 8)
    assert num_cached(kv, (*A, *B, 0)) == 6
    assert num_cached(kv, (*A, 5, 6, 0, 0, 0)) == 8
    kv.check_integrity([sequence])


def test_a_beginning_that_another_one_holds_needs_room_for_its_copy() -> None:
    kv = make_kv(2, min_partial_tokens=2)
    holder = compute(kv, A + B)
    sequence = new_sequence(kv, (*A, 5, 6, 0))
    assert kv.num_blocks_short(sequence, kv.find_cached(sequence)) == 1
    kv.check_integrity([holder])


def test_every_group_must_have_the_beginning() -> None:
    kv = make_kv(groups=(FULL, WINDOW), min_partial_tokens=2)
    kv.release(compute(kv, A + B))
    assert found(kv, (*A, 5, 6, 7, 0, 0)) == (7, [0, 1])
    block = kv.find_cached(new_sequence(kv, (*A, *B, 0))).blocks[1][-1]
    kv._cache.indexes[1].remove(block)
    kv.pools[1].forget(block)
    assert found(kv, (*A, 5, 6, 7, 0, 0)) == (4, [0])


def test_a_block_that_is_still_being_computed_has_no_beginning_to_share() -> None:
    kv = make_kv(min_partial_tokens=2)
    sequence = new_sequence(kv, A + B)
    kv.try_allocate(sequence, 8)
    sequence.num_computed_tokens = 8
    assert found(kv, (*A, 5, 6, 0, 0)) == (0, [])
    kv.end_pending(sequence, 8)
    kv.publish(sequence, 8)
    assert found(kv, (*A, 5, 6, 0, 0)) == (6, [0, 1])


def test_truncation_gives_back_blocks_and_never_spoils_what_others_may_find() -> None:
    kv = make_kv()
    sequence = compute(kv, A)
    sequence.token_ids += (*B, 9)
    finish_compute(kv, sequence)
    kv.truncate(sequence, 6)
    assert sequence.token_ids == [*A, 5, 6]
    assert (sequence.num_computed_tokens, len(sequence.block_tables[0])) == (6, 2)
    kv.check_integrity([sequence])
    assert num_cached(kv, (*A, *B, 0)) == 8, "still there, nobody has written yet"
    sequence.token_ids += [0, 0]
    finish_compute(kv, sequence)
    assert num_cached(kv, (*A, *B, 0)) == 8, "what was written went into a copy"
    assert num_cached(kv, (*A, 5, 6, 0, 0, 0)) == 8


def test_blocks_computed_twice_take_over_when_the_first_copy_is_evicted() -> None:
    """B's entries name A's block; once that is gone, B's own block is found instead."""
    kv = make_kv(6)
    first = new_sequence(kv, A)
    second = new_sequence(kv, A)
    second.seq_id = 1
    for sequence in (first, second):
        finish_compute(kv, sequence)
    kv.release(first)
    second.token_ids += B
    finish_compute(kv, second)
    kv.reset_cache()
    second.token_ids += C
    finish_compute(kv, second)
    assert num_cached(kv, (*A, *B, *C, 0)) == 12
    kv.check_integrity([second])


def test_a_cache_reset_leaves_live_sequences_alone() -> None:
    kv = make_kv()
    kv.release(compute(kv, C))
    live = compute(kv, A)
    assert kv.reset_cache() == 1
    assert num_cached(kv, (*C, 0)) == 0
    assert num_cached(kv, (*A, 0)) == 4
    kv.check_integrity([live])


def test_integrity_check_sees_a_block_held_twice_and_one_held_for_nothing() -> None:
    kv = make_kv()
    sequence = compute(kv, A)
    table = sequence.block_tables[0]
    table.append()
    with pytest.raises(AssertionError, match="idle block"):
        kv.check_integrity([sequence])
    table.truncate(1)
    table.share(table.blocks[:1])
    with pytest.raises(AssertionError, match="twice"):
        kv.check_integrity([sequence])


def test_a_block_says_what_it_is() -> None:
    kv = make_kv()
    assert repr(compute(kv, A).block_tables[0].blocks[0]) == "Block(0, ref_count=1, indexed)"
    assert repr(Block(3)) == "Block(3, ref_count=0)"


def test_what_a_waiting_sequence_found_is_forgotten_with_its_blocks() -> None:
    kv = make_kv(4)
    kv.release(compute(kv, A + B))
    waits = new_sequence(kv, (*A, *B, 0))
    assert kv.find_cached(waits).num_tokens == 8
    hoard = [kv.pools[0].allocate() for _ in range(3)]
    assert kv.find_cached(waits).num_tokens == 4
    hoard.append(kv.pools[0].allocate())
    assert kv.find_cached(waits).num_tokens == 0
    for block in hoard:
        kv.pools[0].free([block])
    kv.release(compute(kv, A + B))
    assert kv.find_cached(waits).num_tokens == 8
    waits.token_ids[8:] = []
    assert kv.find_cached(waits).num_tokens == 4, "the last token is never part of a hit"


def test_a_fork_counts_the_copy_of_its_partly_filled_block() -> None:
    kv = make_kv(4)
    first = compute(kv, (*A, 1, 2))
    twin = Sequence(1, first.request, 1, [*A, 1, 2], kv.new_tables())
    prefix = kv.find_forkable(twin, first)
    assert kv.num_blocks_short(twin, prefix) == 1 - 2


# What is ahead.


def test_a_beginning_that_several_can_share_is_ahead_once() -> None:
    kv = make_kv(64)
    first, second, other = (new_sequence(kv, A + B + last) for last in (C, A, B))
    # Each has a block to grow into.
    assert kv.num_blocks_ahead([first]) == (4,)
    assert kv.num_blocks_ahead([first, second, other]) == (4 + 2 + 2,)
    turns = [new_sequence(kv, A + last) for last in (B + C, C + B, C + B)]
    assert kv.num_blocks_ahead(turns) == (4 + 3 + 2,)
    salted = new_sequence(kv, A + B + C, salt="other")
    assert kv.num_blocks_ahead([first, salted]) == (8,)
    told = make_request(A + B + C, prompt_logprobs=0)
    computed_whole = Sequence(0, told, 0, list(A + B + C), kv.new_tables())
    assert kv.num_blocks_ahead([first, computed_whole]) == (8,)
    uncached = make_kv(64, prefix_caching=False)
    assert uncached.num_blocks_ahead([first, second]) == (8,)


def test_blocks_that_are_there_already_are_not_ahead() -> None:
    kv = make_kv(64)
    running = compute(kv, A + B + C)
    assert kv.num_created_blocks == (3,)
    assert kv.num_blocks_ahead([running]) == (4,)
    kv.release(compute(kv, C + B))
    # Cached ones stay as long as there may be more.
    assert kv.num_created_blocks == (5,)
    assert kv.num_blocks_ahead([running, new_sequence(kv, A + C)]) == (5 + 1 + 2,)
    kv.reset_cache()
    assert kv.num_blocks_ahead([running, new_sequence(kv, A + C)]) == (5 + 1,)


def test_a_window_has_no_more_ahead_than_it_holds_and_what_stays_cached() -> None:
    kv = make_kv(64, groups=(FULL, WINDOW), prefix_caching=False, max_chunk=4)
    # Two chunks, and one block that they may reach into.
    assert kv.num_blocks_ahead([new_sequence(kv, 8 * A)]) == (9, 3)
    for kept in (64, 6, 2):
        groups, kept_blocks = (FULL, WINDOW), (64, kept)
        kv = KVManager(groups, (64, 64), 4, num_kept_blocks=kept_blocks, max_chunk=4)
        assert kv.num_blocks_ahead([new_sequence(kv, 8 * A)]) == (9, min(9, max(kept, 3)))


def test_those_that_do_not_fit_together_are_not_ahead() -> None:
    kv = make_kv(8)
    sequences = [new_sequence(kv, tokens) for tokens in (A + B, C, B + A)]
    assert kv.num_blocks_ahead(sequences[:2]) == (5,)
    assert kv.num_blocks_ahead(sequences) == (8,)
    assert kv.num_blocks_ahead([*sequences, *sequences]) == (8,)
    smaller = make_kv(7)
    assert smaller.num_blocks_ahead(sequences) == (5,)
    # Nor is who comes behind them, so that a long queue is never looked through.
    assert smaller.num_blocks_ahead([*sequences, new_sequence(smaller, C)]) == (5,)
