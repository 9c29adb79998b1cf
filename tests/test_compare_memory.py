"""``scripts/compare_memory.py``: what it counts is exact, and real runs count the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import compare_memory
from scripts.compare import processes, simulate, tables
from scripts.compare.allocators import Allocator, BuddyAllocator, FirstFitAllocator, Region
from scripts.compare.draw import draw
from scripts.compare.systems import (
    Padded,
    Paged,
    Reserving,
    System,
    Usage,
    reserve_maximum,
    reserve_oracle,
    reserve_power_of_two,
)
from scripts.compare.traces import (
    CHAT,
    WORKLOADS,
    Job,
    Maker,
    Trace,
    check_budget,
    own_trace,
    read_jobs,
)

SCRIPT = Path(__file__).parents[1] / "scripts" / "compare_memory.py"


def job(prompt: int, outputs: int, n: int = 1, first: int = 0) -> Job:
    return Job(tuple(range(first, first + prompt)), outputs, n)


def trace(jobs: Sequence[Job], max_len: int = 64, budget_slots: int = 256) -> Trace:
    return Trace("test", "", tuple(jobs), max_len, budget_slots)


def systems(budget: int = 256, max_len: int = 64) -> dict[str, System]:
    return {
        "maximum": Reserving(BuddyAllocator(budget), reserve_maximum(max_len)),
        "power of two": Reserving(BuddyAllocator(budget), reserve_power_of_two(max_len)),
        "oracle": Reserving(FirstFitAllocator(budget), reserve_oracle),
        "padded": Padded(budget, growth=16),
        "paged": Paged(budget, 4),
    }


def random_jobs(seed: int, count: int = 60, longest: int = 32) -> list[Job]:
    generator = np.random.default_rng(seed)
    return [
        job(int(p), int(o), int(n), first=100 * index)
        for index, (p, o, n) in enumerate(
            zip(
                generator.integers(1, longest, count),
                generator.integers(1, longest, count),
                generator.integers(1, 4, count),
                strict=True,
            )
        )
    ]


# Allocators.


@pytest.mark.parametrize("make", [BuddyAllocator, FirstFitAllocator])
@given(
    num_slots=st.integers(1, 200),
    asks=st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=40),
)
def test_regions_never_overlap_and_all_memory_comes_back(
    make: Callable[[int], Allocator], num_slots: int, asks: list[tuple[bool, int]]
):
    allocator = make(num_slots)
    whole = allocator.try_allocate(1 << (num_slots.bit_length() - 1))
    assert whole is not None
    allocator.free(whole)
    held: list[Region] = []
    for is_ask, size in asks:
        if not is_ask and held:
            allocator.free(held.pop(size % len(held)))
        elif (region := allocator.try_allocate(size)) is not None:
            assert region.granted >= size
            held.append(region)
        taken = [slot for r in held for slot in range(r.start, r.start + r.granted)]
        assert len(taken) == len(set(taken)) == num_slots - allocator.num_free
        assert not taken or max(taken) < num_slots
    for region in held:
        allocator.free(region)
    # Whatever was cut has grown together again.
    assert allocator.num_free == num_slots
    assert allocator.try_allocate(1 << (num_slots.bit_length() - 1)) is not None


def test_buddies_round_up_to_a_power_of_two_and_first_fit_does_not():
    buddy, fitting = BuddyAllocator(256).try_allocate(65), FirstFitAllocator(256).try_allocate(65)
    assert buddy is not None
    assert fitting is not None
    assert (buddy.granted, fitting.granted) == (128, 65)


# What a system says of its memory.


def test_each_scheme_reserves_what_the_paper_says():
    asked = job(20, 25)
    assert reserve_maximum(2048)(asked) == 2048
    assert reserve_power_of_two(2048)(asked) == 20 + 32
    assert reserve_power_of_two(2048)(job(20, 32)) == 20 + 32
    assert reserve_oracle(asked) == 20 + 25 - 1


@pytest.mark.parametrize("name", systems())
@pytest.mark.parametrize("seed", range(3))
def test_every_slot_is_counted_once_and_every_token_is_computed(name: str, seed: int):
    jobs = random_jobs(seed)
    system = systems()[name]
    record = simulate.run(trace(jobs), system)
    for usage in record.usages:
        parts = usage.needed + usage.reserved + usage.internal + usage.external
        assert min(usage.needed, usage.reserved, usage.internal, usage.external) >= 0
        assert parts == (256 if usage.is_short else usage.held)
        assert usage.held <= 256
        assert usage.needed <= usage.logical
    computed = sum(usage.num_tokens for usage in record.usages)
    wanted = sum(each.n * each.num_slots for each in jobs)
    if isinstance(system, Paged):
        counts = system.stats()
        assert computed == counts.num_computed_tokens
        assert counts.num_output_tokens == sum(each.n * each.num_outputs for each in jobs)
        system.kv.check_integrity(())
    else:
        assert computed == wanted


def test_a_reservation_is_split_into_filled_to_come_never_filled_and_rounding():
    (first, _) = systems(max_len=48)["maximum"], None
    first.add(0, job(10, 6))
    outcome = first.step()
    assert outcome is not None
    usage, _ = outcome
    assert (usage.needed, usage.reserved, usage.internal, usage.external) == (10, 5, 33, 16)
    assert usage.held == 64


def test_a_paged_sequence_holds_less_than_a_block_that_it_has_not_filled():
    system = Paged(256, 4)
    system.add(0, job(10, 2))
    outcome = system.step()
    assert outcome is not None
    usage, _ = outcome
    # Three blocks hold ten tokens; one more is to come, and the last slot will stay empty.
    assert (usage.needed, usage.reserved, usage.internal, usage.held) == (10, 1, 1, 12)


def test_a_padded_batch_holds_a_row_as_long_as_the_longest_for_each():
    system = Padded(98_304)
    for index, prompt in enumerate((30_000, 5_000, 10)):
        system.add(index, job(prompt, 256))
    usages: list[Usage] = []
    while (outcome := system.step()) is not None:
        usages.append(outcome[0])
    assert max(usage.held for usage in usages) == 3 * 30_208
    longest = max(usages, key=lambda usage: usage.needed if usage.num_running == 3 else 0)
    assert longest.needed >= 35_010


def test_candidates_of_one_prompt_share_it_in_blocks_only():
    jobs = [job(41, 8, n=4)]
    paged = simulate.summary(trace(jobs), simulate.run(trace(jobs), Paged(1024, 4)))
    oracle = Reserving(FirstFitAllocator(1024), reserve_oracle)
    reserved = simulate.summary(trace(jobs), simulate.run(trace(jobs), oracle))
    # One prompt of 10 full blocks, then for each candidate a tail of at most 3.
    assert paged["peak_held_slots"] <= 40 + 4 * 3 * 4
    assert reserved["peak_held_slots"] == 4 * 48
    assert paged["shared_slots"] > 0 == reserved["shared_slots"]


def test_a_closed_loop_never_has_more_in_flight_than_it_is_told():
    jobs = random_jobs(1, count=20)
    jobs = [replace(each, n=1) for each in jobs]
    looped = replace(trace(jobs, budget_slots=4096), concurrency=3)
    record = simulate.run(looped, Paged(4096, 4))
    assert max(usage.num_running + usage.num_waiting for usage in record.usages) == 3


def test_requests_start_no_sooner_than_they_arrive():
    late = [job(5, 3), replace(job(5, 3, first=50), arrival_s=7.0)]
    record = simulate.run(trace(late), Paged(256, 4))
    assert 7.0 in record.starts
    assert max(usage.num_running for usage in record.usages) == 1


# Traces.


def test_the_same_seed_makes_the_same_trace_and_another_one_another():
    assert Maker(1).make("chat") == Maker(1).make("chat") != Maker(2).make("chat")


def test_chat_has_the_published_means_after_lengths_were_cut():
    made = Maker().make("chat")
    assert np.mean([len(each.prompt) for each in made.jobs]) == pytest.approx(CHAT[0], abs=0.1)
    assert np.mean([each.num_outputs for each in made.jobs]) == pytest.approx(CHAT[1], abs=0.1)
    assert max(len(each.prompt) + each.num_outputs for each in made.jobs) <= made.max_len
    assert [each.arrival_s for each in made.jobs] == sorted(each.arrival_s for each in made.jobs)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_fits_its_maximum_its_memory_and_the_vocabulary(name: str):
    made = Maker(vocab_size=300, count=6).make(name)
    check_budget(made)
    for each in made.jobs:
        assert len(each.prompt) + each.num_outputs <= made.max_len
        assert max(each.prompt) < 300


def test_memory_too_small_for_one_reservation_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"chat: the memory holds 1024 tokens.* 2048"):
        check_budget(Maker(budget_slots=1024).make("chat"))


def test_own_requests_may_be_text_tokens_or_lengths(tmp_path: Path):
    path = tmp_path / "own.jsonl"
    rows = [
        {"prompt": "abc", "max_tokens": 5, "arrival_s": 2},
        {"prompt_token_ids": [4, 5], "max_tokens": 1, "n": 3},
        {"num_prompt_tokens": 3000, "max_tokens": 7},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    jobs = read_jobs(path, lambda text: [ord(letter) for letter in text], 100)
    assert [len(each.prompt) for each in jobs] == [2, 3000, 3]
    assert jobs[2] == Job((97, 98, 99), 5, 1, 2.0)
    assert jobs[0].n == 3
    assert own_trace(jobs).max_len == 4096
    check_budget(own_trace(jobs))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"prompt_token_ids": [], "max_tokens": 1}',
        '{"num_prompt_tokens": 5}',
        '{"num_prompt_tokens": 5, "max_tokens": 0}',
        '{"num_prompt_tokens": 5, "max_tokens": 1, "arrival_s": -1}',
        '{"num_prompt_tokens": -5, "max_tokens": 1}',
    ],
)
def test_a_bad_row_is_refused_with_its_number(tmp_path: Path, line: str):
    path = tmp_path / "own.jsonl"
    path.write_text('{"num_prompt_tokens": 5, "max_tokens": 1}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        read_jobs(path, lambda _: [], 100)


# What the comparison says on the paper's workload.


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = tmp_path_factory.mktemp("report") / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, SCRIPT, "--model", "none", "--json", target),
            *("--workloads", "chat,shared", "--requests", "100"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(target.read_text())


def test_the_schemes_stand_where_the_paper_puts_them(report: dict[str, Any]):
    schemes = report["workloads"]["chat"]["schemes"]
    published = {"maximum": 0.204, "power of two": 0.268, "oracle": 0.382}
    for scheme, share in published.items():
        assert schemes[scheme]["shares"]["needed"] == pytest.approx(share, abs=0.05)
    assert schemes["pagedmlx"]["waste"] < 0.04
    fit = {scheme: row["sequences_at_once"] for scheme, row in schemes.items()}
    assert fit["pagedmlx"] >= 3.5 * fit["maximum"]
    # Even where the reservations are spared the buddy allocator's rounding.
    assert fit["pagedmlx"] >= 1.5 * schemes["oracle"]["first_fit"]["sequences_at_once"]


def test_a_shared_system_prompt_is_held_once(report: dict[str, Any]):
    row = report["workloads"]["shared"]["schemes"]["pagedmlx"]
    alone = row["without_prefix_caching"]["held_slots_per_sequence"]
    assert row["held_slots_per_sequence"] <= 0.6 * alone


def test_smaller_blocks_waste_less_and_need_longer_tables(report: dict[str, Any]):
    rows = report["block_sizes"]
    assert [row["block_size"] for row in rows] == [8, 16, 32, 64, 128]
    unfilled = [row["unfilled"] for row in rows]
    entries = [row["table_bytes_per_sequence"] for row in rows]
    assert unfilled == sorted(unfilled)
    assert entries == sorted(entries, reverse=True)


# Real runs.


@pytest.fixture(scope="module")
def real_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("real")
    own = folder / "own.jsonl"
    rows = [
        {"num_prompt_tokens": 40, "max_tokens": 6},
        {"prompt": "hello", "max_tokens": 9, "n": 2},
        {"prompt": "hello", "max_tokens": 3},
    ]
    own.write_text("\n".join(map(json.dumps, rows)))
    done = subprocess.run(
        [
            *(sys.executable, SCRIPT, "--model", "tiny:llama", "--workloads", "own"),
            *("--real", "own", "--requests-file", own, "--charts", folder, "--json", "-"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("memory-*.png"))) == 3
    return json.loads(done.stdout)


def test_a_real_run_counts_what_the_core_counts_and_says_what_mlx_lm_says(
    real_report: dict[str, Any],
):
    ours = real_report["real"]["own"]["systems"]["pagedmlx"]
    assert ours["counts_equal_core"] is True
    for name in processes.TIMELESS:
        assert ours["counts"][name] == ours["core"][name]
    assert ours["num_outputs"] == ours["outputs_equal_mlx_lm"] == 4
    assert ours["num_output_tokens"] == 6 + 2 * 9 + 3


def test_each_kind_of_memory_is_told_apart(real_report: dict[str, Any]):
    systems = real_report["real"]["own"]["systems"]
    for row in systems.values():
        assert 0 < row["kv_needed_peak_bytes"] <= row["kv_held_peak_bytes"]
        assert row["kv_held_peak_bytes"] <= row["peak_above_weights_bytes"]
        assert row["weights_bytes"] < row["peak_bytes"] < row["resident_peak_bytes"]
        assert len(set(map(len, row["series"].values()))) == 1
    assert systems["pagedmlx"]["pool_bytes"] >= systems["pagedmlx"]["kv_held_peak_bytes"]
    # The same weights, and a little besides; mlx-lm's rows are padded to a multiple of 256.
    weights = [row["weights_bytes"] for row in systems.values()]
    assert weights[0] == pytest.approx(weights[1], rel=0.3)
    assert systems["mlx-lm"]["kv_held_peak_bytes"] >= 4 * 256 * real_report["token_bytes"]


def test_tables_and_pictures_hold_everything(real_report: dict[str, Any], tmp_path: Path):
    text = tables.markdown(real_report)
    for word in (*simulate.SCHEMES, "mlx-lm", "4 of 4 outputs", "equal to the core's"):
        assert word in text
    assert all(path.stat().st_size > 5_000 for path in draw(real_report, tmp_path))


def test_counts_that_differ_fail_the_script(real_report: dict[str, Any]):
    assert compare_memory.unequal(real_report) == []
    broken = json.loads(json.dumps(real_report))
    broken["real"]["own"]["systems"]["pagedmlx"]["counts_equal_core"] = False
    (problem,) = compare_memory.unequal(broken)
    assert "own" in problem


def test_a_process_that_dies_is_told_with_its_last_words(tmp_path: Path):
    with pytest.raises(processes.RealRunError, match="nothing-here"):
        processes.inspect(str(tmp_path / "nothing-here"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workloads", "chatt"], "no workload chatt"),
        (["--markdown", "missing/tables.md"], "missing is not a folder"),
        (["--charts", __file__], "is not a folder"),
        (["--kv-memory", "much"], "no size"),
        (["--rate", "-1"], "--rate"),
        (["--requests", "0"], "at least 1"),
        (["--model", "none", "--kv-memory", "1MiB"], "the memory holds 1 tokens"),
        (["--requests-file", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_arguments_are_refused_in_words(arguments: list[str], words: str):
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_sizes_are_read_with_and_without_units():
    sizes = map(compare_memory.parse_size, ("10", "1KiB", "1.5 GiB", "2m"))
    assert list(sizes) == [10, 1024, 3 << 29, 2 << 20]
