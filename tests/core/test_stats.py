from __future__ import annotations

from tests.support.core import FULL, WINDOW, make_driver, make_request


def test_counts_of_a_run_that_waits_shares_and_copies_add_up() -> None:
    driver = make_driver(6, 4)
    driver.add(make_request(range(10, 16), 5, request_id="pair", n=2))
    driver.add(make_request(range(30, 46), 3, request_id="waits"))
    driver.step()
    before = driver.scheduler.stats()
    assert (before.num_running, before.num_waiting) == (1, 2)
    driver.step()
    now = driver.scheduler.stats()
    assert (now.num_running, now.num_waiting, now.num_waits) == (2, 1, 1)
    assert (now.num_used_blocks, now.num_shared_blocks, now.num_copies) == (3, 1, 1)
    assert now.num_used_blocks + now.num_cached_blocks + now.num_free_blocks == now.num_blocks == 6
    assert now.waste_slots == sum(
        4 * len(s.block_tables[0]) - s.num_computed_tokens for s in driver.scheduler.running
    )
    assert now.mean_fill_while_waiting is not None
    assert 0 < now.mean_fill_while_waiting <= 1
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.num_requests, stats.num_finished_requests) == (2, 2)
    assert stats.num_output_tokens == 5 + 5 + 3
    assert stats.num_prompt_tokens == 6 + 6 + 16
    assert stats.num_cached_tokens == 5
    assert stats.num_computed_tokens == sum(step.num_tokens for step in driver.steps)
    assert stats.num_steps == len(driver.steps)
    assert stats.max_waste_slots < 4
    assert stats.peak_used_blocks <= 6
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.waste_slots == 0


def test_a_fresh_scheduler_has_counted_nothing() -> None:
    stats = make_driver(6, 4).scheduler.stats()
    assert (stats.num_blocks, stats.num_free_blocks, stats.block_size) == (6, 6, 4)
    assert stats.mean_fill_while_waiting is None
    assert stats.num_steps == stats.num_requests == stats.num_waits == 0


def test_block_counts_are_of_the_fullest_group() -> None:
    driver = make_driver(6, 4, groups=(FULL, WINDOW))
    hoard = driver.kv.pools[1].allocate()
    stats = driver.scheduler.stats()
    assert (stats.num_used_blocks, stats.num_free_blocks) == (1, 5)
    driver.kv.pools[1].free([hoard])


def test_preemptions_and_overtakes_are_counted_on_the_sequence_and_in_all() -> None:
    driver = make_driver(6, 4, prefix_caching=False)
    for number in range(3):
        driver.add(make_request(range(50 * number, 50 * number + 4), 16, request_id=str(number)))
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_preemptions == sum(s.num_preemptions for s in driver.sequences) > 0
    assert stats.num_overtakes == sum(s.num_overtaken for s in driver.sequences)
    assert stats.num_output_tokens == 3 * 16
    driver.check_empty()
