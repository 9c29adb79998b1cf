"""The example of docs/how-it-works.md, played on the real scheduler; it holds the page to it."""

from __future__ import annotations

from pathlib import Path

from tests.support.core import make_driver, make_request

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8").split())
PICTURE = (ROOT / "assets" / "how-it-works.svg").read_text(encoding="utf-8")

BLOCK_SIZE = 4
NUM_BLOCKS = 6
A_TOKENS, B_TOKENS, B_LATER, C_TOKENS = 6, 9, 13, 3
CONTEXT = 32  # what a reserving cache would set aside for each conversation


def test_blocks_pass_from_a_finished_sequence_to_others_and_nothing_moves() -> None:
    driver = make_driver(NUM_BLOCKS, BLOCK_SIZE, prefix_caching=False)
    (a,) = driver.add(make_request(range(10, 10 + A_TOKENS), 9, request_id="A"))
    (b,) = driver.add(make_request(range(20, 20 + B_TOKENS), 9, request_id="B"))
    driver.step()
    a_blocks = a.block_tables[0].as_array().tolist()
    b_blocks = b.block_tables[0].as_array().tolist()
    stats = driver.scheduler.stats()
    num_tokens = a.num_computed_tokens + b.num_computed_tokens
    num_slots = stats.num_used_blocks * BLOCK_SIZE
    assert (num_tokens, stats.num_used_blocks, num_slots) == (15, 5, 20)
    assert stats.waste_slots == num_slots - num_tokens
    assert f"{num_tokens} tokens lie in {stats.num_used_blocks} blocks" in PAGE
    assert f"{num_slots} slots" in PAGE
    assert f"{2 * CONTEXT} slots" in PAGE
    assert f"A holds blocks {_names(a_blocks)}, B holds blocks {_names(b_blocks)}" in PAGE

    driver.scheduler.abort("A")
    while b.num_computed_tokens < B_LATER:
        driver.step()
    grown = b.block_tables[0].as_array().tolist()
    assert grown[:-1] == b_blocks
    assert grown[-1] in a_blocks
    assert f"B grows to {B_LATER} tokens and takes block {grown[-1]}" in PAGE
    assert f"its table now reads {_names(grown)}" in PAGE

    (c,) = driver.add(make_request(range(30, 30 + C_TOKENS), 9, request_id="C"))
    driver.step()
    (c_block,) = c.block_tables[0].as_array().tolist()
    assert {c_block, grown[-1]} == set(a_blocks)
    assert f"C, {C_TOKENS} tokens long, takes block {c_block}" in PAGE
    assert not any(step.copies for step in driver.steps)
    for name, blocks in (("A", a_blocks), ("B", b_blocks), ("B", grown), ("C", [c_block])):
        assert f"{name}: {' '.join(map(str, blocks))}<" in PICTURE
    driver.run()
    driver.check_outputs()


def test_two_candidates_share_a_prompt_and_copy_only_its_partly_filled_block() -> None:
    driver = make_driver(NUM_BLOCKS, BLOCK_SIZE)
    first, second = driver.add(make_request(range(10, 10 + A_TOKENS), 5, n=2))
    driver.step()
    step = driver.step()
    assert step is not None
    ours, theirs = (s.block_tables[0].as_array().tolist() for s in (first, second))
    assert ours[0] == theirs[0], "the full block is shared"
    assert ours[1] != theirs[1], "the partly filled one is not"
    assert [(copy.src, copy.dst) for copy in step.copies] == [(ours[1], theirs[1])]
    num_blocks = driver.scheduler.stats().num_used_blocks
    assert num_blocks == 3
    assert f"together they hold {num_blocks} blocks, not {len(ours) + len(theirs)}" in PAGE
    driver.run()
    driver.check_outputs()


def test_a_shared_prompt_of_whole_blocks_is_never_copied() -> None:
    driver = make_driver(NUM_BLOCKS, BLOCK_SIZE)
    driver.add(make_request(range(10, 10 + 2 * BLOCK_SIZE + 1), 4, n=2))
    driver.run()
    assert driver.scheduler.stats().num_copies == 0
    driver.check_outputs()


def _names(blocks: list[int]) -> str:
    """Block ids as English: 0 and 1; 2, 3 and 4."""
    *head, last = map(str, blocks)
    return f"{', '.join(head)} and {last}"
