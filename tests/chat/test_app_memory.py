"""The block map, the gauges and the queue show what the engine is doing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from dataclasses import replace

import numpy as np
import pytest

from pagedmlx.chat.client import ChatRequest, Delta
from pagedmlx.chat.demo import DemoClient
from pagedmlx.chat.widgets.block_map import BlockMap
from pagedmlx.chat.widgets.gauges import Rates, bar, curve
from pagedmlx.chat.widgets.panel import MemoryPanel
from pagedmlx.core.snapshot import EngineSnapshot, PoolSnapshot, SequenceSnapshot
from pagedmlx.core.stats import EngineStats
from tests.support.chat import (
    FakeClient,
    calm,
    failed,
    running,
    say,
    screen_text,
    settle,
    shows,
    until,
)

SIZES = [(80, 24), (120, 40), (200, 60)]


class StillClient(FakeClient):
    """Shows one snapshot, and says nothing."""

    def __init__(self, snapshot: EngineSnapshot) -> None:
        super().__init__()
        self.shown = snapshot

    async def snapshot(self) -> EngineSnapshot | None:
        return self.shown

    async def answer(self, request: ChatRequest) -> AsyncGenerator[Delta]:
        await asyncio.sleep(1000)
        yield Delta()


def still(num_blocks: int, *, num_pools: int = 1) -> EngineSnapshot:
    """Two sequences that share block 0, one that waits; block 5 and the last one are cached."""

    def sequence(name: str, blocks: list[int], status: str, missing: int = 0) -> SequenceSnapshot:
        table = np.array(blocks, np.int32)
        return SequenceSnapshot(
            name, 0, status, 0, 8, 4, 14 if blocks else 0, 0, missing, 0, (table,) * num_pools
        )

    sequences = (
        sequence("one", [0, 1], "running"),
        sequence("two", [0, 2], "running"),
        sequence("three", [], "waiting", 7),
        sequence("four", [], "preempted", 2),
        sequence("five", [], "waiting"),
    )
    owners, refs = np.full(num_blocks, -1, np.int32), np.zeros(num_blocks, np.int32)
    owners[[0, 1, 2]], refs[[0, 1, 2]] = [0, 0, 1], [2, 1, 1]
    is_cached = np.zeros(num_blocks, np.bool_)
    is_cached[[5, num_blocks - 1]] = True
    stats = EngineStats(
        block_size=8,
        num_blocks=num_blocks,
        num_used_blocks=3,
        num_cached_blocks=1,
        num_shared_blocks=1,
        num_free_blocks=num_blocks - 4,
        num_running=2,
        num_waiting=3,
        block_bytes=1024 * 1024,
        pool_bytes=num_blocks * 1024 * 1024,
    )
    return EngineSnapshot(stats, sequences, (PoolSnapshot(owners, refs, is_cached),) * num_pools)


def look(
    snapshot: EngineSnapshot,
    *texts: str,
    size: tuple[int, int] = (120, 40),
    keys: tuple[str, ...] = (),
) -> str:
    """What the screen shows of a snapshot after some keys, once it says all these texts."""

    async def run() -> str:
        async with running(StillClient(snapshot), size=size) as (app, pilot):
            await until(pilot, lambda: app.client is not None)
            app._slot_of.update({"one": 0, "two": 1})
            await until(pilot, lambda: app.query_one(MemoryPanel).history.snapshot is not None)
            await pilot.press(*keys)
            return await shows(pilot, *texts)

    return asyncio.run(run())


@pytest.mark.parametrize("size", SIZES)
def test_each_state_of_a_block_has_a_character_of_its_own(size: tuple[int, int]) -> None:
    async def run() -> None:
        async with running(StillClient(still(64)), size=size) as (app, pilot):
            app._slot_of.update({"one": 0, "two": 1})
            await until(pilot, lambda: "2AB··░·" in "".join(screen_text(app).split(" ")))

    asyncio.run(run())


def test_the_numbers_say_what_is_used_shared_and_saved() -> None:
    # Two caches of 100 tokens are 13 blocks each.
    saved = "paging saves 23.0 MiB, sharing 1.0 MiB"
    look(still(64), "3/64", "3.0 MiB of 64.0 MiB", saved)


@pytest.mark.parametrize("size", SIZES)
def test_what_the_engine_has_counted_is_a_page_in_words(size: tuple[int, int]) -> None:
    async def run() -> None:
        async with running(StillClient(still(64)), size=size) as (app, pilot):
            await say(pilot, "/stats")
            await shows(pilot, "2 running, 3 waiting", "3 in use, 1 of them shared", "64.0 MiB")
            await pilot.press("end")
            await shows(pilot, "lost their blocks")
            await pilot.press("escape")
            await until(pilot, lambda: "lost their blocks" not in screen_text(app))

    asyncio.run(run())


def test_who_waits_is_named_with_the_reason() -> None:
    reasons = ("7 blocks are missing", "gave its blocks", "its turn comes soon")
    look(still(64), "3 waiting", *reasons)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (("right",), "block 0 · held by 2"),
        (("right", "right"), "block 1 · held by 1"),
        (("right", "right"), "A place 1, tokens 8-15, 6 of 8 filled"),
        (("right", *["right"] * 5), "block 5 · cached"),
        (("right", *["right"] * 3), "block 3 · free"),
        (("right", "left"), "block 0 · held by 2"),
    ],
)
def test_a_selected_block_tells_about_itself(keys: tuple[str, ...], text: str) -> None:
    look(still(64), text, keys=("f3", *keys))


def test_a_narrow_screen_says_first_who_waits_and_names_every_key() -> None:
    keys = ("Messages", "Quit", "Help", "Memory", "Settings", "Saved", "New", "palette")
    look(still(64), "3 waiting · 0 tok/s", *keys, size=(80, 24))


def test_candidates_that_hold_a_block_are_told_apart() -> None:
    seen = still(64)
    first, second, *others = seen.sequences
    second = replace(second, request_id=first.request_id, index=1)
    seen = replace(seen, sequences=(first, second, *others))
    look(seen, "[2]", "A[1] place 0", "A[2] place 0", keys=("f3", "right"))


@pytest.mark.parametrize("theme", ["textual-light", "ansi-light", "ansi-dark"])
def test_the_map_takes_the_colours_of_a_theme(theme: str) -> None:
    async def run() -> None:
        async with running(StillClient(still(64))) as (app, pilot):
            app._slot_of.update({"one": 0, "two": 1})
            await shows(pilot, "B")
            blocks = app.query_one(BlockMap)
            await until(pilot, lambda: blocks._rows)
            before = [segment.style for segment in blocks._rows[0]]
            app.theme = theme
            await until(pilot, lambda: app.is_dark == (theme == "ansi-dark"))
            if not app.is_dark:
                await until(pilot, lambda: [each.style for each in blocks._rows[0]] != before)
            await shows(pilot, "2 ", "A ", "B ")

    asyncio.run(run())


def test_a_block_is_selected_with_the_mouse() -> None:
    async def run() -> None:
        async with running(StillClient(still(64))) as (app, pilot):
            panel = app.query_one(MemoryPanel)
            await until(pilot, lambda: panel.history.snapshot is not None)
            await calm(pilot)
            blocks = app.query_one(BlockMap)
            await pilot.click(BlockMap, offset=(blocks._cell_width * 2 + 1, 0))
            await until(pilot, lambda: blocks.selected_blocks == range(2, 3))
            await shows(pilot, "block 2 · held by 1")

    asyncio.run(run())


@pytest.mark.parametrize("size", SIZES)
def test_a_pool_of_100_000_blocks_is_shown_in_sums(size: tuple[int, int]) -> None:
    sums = "3 in use, 1 of them shared, 1 cached"
    meant = ("A in use", "2 shared", "1 cell = ")
    look(still(100_000), sums, "blocks 0-", *meant, size=size, keys=("f3", "right"))


def test_several_pools_are_shown_one_after_the_other() -> None:
    text = "block 0 of pool 2/2 (g) · held by 2"
    look(still(64, num_pools=2), text, keys=("f3", "right", "g"))


def test_without_colour_the_map_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = look(still(64), "3/64", "3 waiting")
    monkeypatch.setenv("NO_COLOR", "1")
    assert look(still(64), "3/64", "3 waiting").split("\n")[9] == plain.split("\n")[9]


def test_an_endpoint_that_tells_nothing_has_no_map() -> None:
    async def run() -> None:
        async with running(FakeClient()) as (app, pilot):
            await until(pilot, lambda: "does not tell" in screen_text(app))
            assert not app.query_one(BlockMap).display
            await until(pilot, lambda: app.query_one(MemoryPanel).size.height == 1)

    asyncio.run(run())


def test_an_endpoint_that_went_away_is_told_until_it_is_back() -> None:
    class Away(DemoClient):
        is_away = False

        async def snapshot(self) -> EngineSnapshot | None:
            if self.is_away:
                raise failed("http://host doesn't answer")
            return await super().snapshot()

    async def run() -> None:
        client = Away()
        async with running(client) as (app, pilot):
            for is_away, shown in ((False, "in use"), (True, "doesn't answer"), (False, "in use")):
                client.is_away = is_away
                await shows(pilot, shown)
                await until(pilot, lambda away=is_away: app.query_one(BlockMap).display != away)

    asyncio.run(run())


def test_a_hidden_map_asks_the_engine_nothing() -> None:
    class Counting(StillClient):
        count = 0

        async def snapshot(self) -> EngineSnapshot | None:
            self.count += 1
            return self.shown

    async def run() -> None:
        client = Counting(still(64))
        async with running(client) as (app, pilot):
            await until(pilot, lambda: client.count)
            await pilot.press("f2")
            await until(pilot, lambda: not app.query_one(MemoryPanel).display)
            before = client.count
            for _ in range(3):
                await app.watching.look()
            assert client.count == before
            await pilot.press("f2")
            await until(pilot, lambda: client.count > before)

    asyncio.run(run())


def test_text_waits_for_no_map() -> None:
    class Silent(FakeClient):
        async def snapshot(self) -> EngineSnapshot | None:
            await asyncio.sleep(1000)
            return None

    async def run() -> None:
        client = Silent()
        client.gate = asyncio.Semaphore(1)
        async with running(client) as (_app, pilot):
            await say(pilot, "hi")
            await shows(pilot, "Hello", "writing")

    asyncio.run(run())


def test_what_is_loaded_is_not_searched_for_garbage_while_it_is_used() -> None:
    async def run() -> None:
        async with running(FakeClient()) as (app, _pilot):
            await app.ready_client()
            assert gc.get_freeze_count()
        assert not gc.get_freeze_count()

    asyncio.run(run())


def test_candidates_share_the_prompt_and_copy_its_last_block() -> None:
    async def run() -> tuple[int, int]:
        client = DemoClient(0.01)
        async with running(client) as (app, pilot):
            await until(pilot, lambda: app.client is not None)
            await app.pane.send("many words " * 10 + "and a name", 3)
            shared = 0
            while app.pane.is_busy:
                shared = max(shared, client.pool.snapshot().stats.num_shared_blocks)
                await asyncio.sleep(0)
            await settle(pilot)
            return shared, client.pool.snapshot().stats.num_copies

    shared, copies = asyncio.run(run())
    assert shared >= 2
    assert copies == 2


def test_rates_are_over_a_moment_and_survive_another_engine() -> None:
    rates = Rates()
    for step in range(30):
        rates.add(EngineStats(num_output_tokens=step * 5, num_blocks=10), step * 0.1)
    assert rates.tokens_per_s == pytest.approx(50.0)
    rates.add(EngineStats(num_output_tokens=0, num_blocks=10), 3.1)
    assert rates.tokens_per_s == 0.0


def test_bars_and_curves_have_the_width_that_they_should() -> None:
    assert bar(0.0, 4) == "····"
    assert bar(1.0, 4) == "████"
    assert bar(0.5, 3) == "█▌·"
    assert bar(7.0, 2) == "██"
    assert curve([0, 1, 2], 5, 2.0) == "   ▄█"
    assert curve([], 3, 0.0) == "   "
