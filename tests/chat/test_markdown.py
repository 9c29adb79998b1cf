"""An answer on the screen: what is drawn of it, and how little of it is drawn anew."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from textual.app import App, ComposeResult
from textual.geometry import Offset, Region
from textual.pilot import Pilot
from textual.selection import Selection

from pagedmlx.chat.pieces import Piece
from pagedmlx.chat.widgets.ink import Ink
from pagedmlx.chat.widgets.markdown import GrowingMarkdown
from tests.support.chat import MARKDOWN, WAIT_S

Story = Callable[[GrowingMarkdown, Pilot[None]], Awaitable[None]]
CODE = "```python\n" + "\n".join(f"x{line} = {line}" for line in range(100)) + "\n```\n"


class Page(App[None]):
    """Nothing but an answer."""

    copied = ""

    def compose(self) -> ComposeResult:
        yield GrowingMarkdown()

    def on_growing_markdown_copy_wanted(self, event: GrowingMarkdown.CopyWanted) -> None:
        self.copied = event.code


def play(story: Story, size: tuple[int, int] = (60, 80)) -> None:
    async def run() -> None:
        app = Page()
        async with app.run_test(size=size) as pilot:
            await story(app.query_one(GrowingMarkdown), pilot)

    asyncio.run(run())


async def until(happens: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not happens():
            await asyncio.sleep(0.01)


def test_an_answer_in_parts_looks_like_the_whole_of_it() -> None:
    async def story(answer: GrowingMarkdown, pilot: Pilot[None]) -> None:
        answer.show(MARKDOWN)
        whole = answer.plain
        answer.show("")
        assert answer.plain == ""
        for end in range(0, len(MARKDOWN), 5):
            answer.show(MARKDOWN[:end], is_done=False)
        answer.show(MARKDOWN)
        assert answer.plain == whole
        await until(lambda: answer.size.height == len(whole.split("\n")))
        for text in (
            "[red]x[/red]",
            "<b>hi</b> !pic (u).",
            "link (http://x.y)",
            " 2. two",
            "▌ quote",
        ):
            assert text in whole
        assert "```" not in whole

    play(story)


def test_a_finished_piece_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Piece] = []
    draw = Ink.draw

    def counted(self: Ink, piece: Piece, width: int, *, is_open: bool = False) -> object:
        drawn.append(piece)
        return draw(self, piece, width, is_open=is_open)

    async def story(answer: GrowingMarkdown, pilot: Pilot[None]) -> None:
        monkeypatch.setattr(Ink, "draw", counted)
        text = "".join(f"Paragraph {place}.\n\n" for place in range(50))
        for end in range(0, len(text), 10):
            answer.show(text[:end], is_done=False)
        # Each is drawn while it grows by its two or three parts, and not afterwards.
        assert len(drawn) < 50 * 4

    play(story)


def test_an_answer_that_grows_gets_room_before_it_needs_it() -> None:
    async def story(answer: GrowingMarkdown, pilot: Pilot[None]) -> None:
        for text, height in (("one", 4), ("one\n\ntwo", 4), ("one\n\ntwo\n\nthree", 8)):
            answer.show(text, is_done=False)
            await until(lambda: answer.size.height == height)  # noqa: B023
            assert answer.render_lines(Region(0, 0, 60, height))[2].text.startswith(
                "two" if "two" in text else "   "
            )
        answer.show("one\n\ntwo\n\nthree")
        await until(lambda: answer.size.height == 5)

    play(story)


def test_code_that_grows_looks_like_code_that_is_whole() -> None:
    async def story(answer: GrowingMarkdown, pilot: Pilot[None]) -> None:
        for end in range(0, len(CODE), 50):
            answer.show(CODE[:end], is_done=False)
        answer.show(CODE, is_done=False)
        growing = answer.plain
        answer.show(CODE)
        assert answer.plain == growing
        assert growing.split("\n")[99].strip() == "x99 = 99"

    play(story)


def test_a_double_click_copies_the_code_under_it() -> None:
    async def story(answer: GrowingMarkdown, pilot: Pilot[None]) -> None:
        answer.show("Text.\n\n```\none\ntwo\n```\n\nMore.")
        await until(lambda: answer.size.height == 6)
        await pilot.click(GrowingMarkdown, offset=(2, 5), times=2)
        assert app_of(pilot).copied == ""
        await pilot.click(GrowingMarkdown, offset=(2, 3), times=2)
        await until(lambda: app_of(pilot).copied == "one\ntwo")

    play(story)


def app_of(pilot: Pilot[None]) -> Page:
    assert isinstance(pilot.app, Page)
    return pilot.app


def test_what_is_selected_is_told_and_marked() -> None:
    async def story(answer: GrowingMarkdown, pilot: Pilot[None]) -> None:
        answer.show("日本 one\n\ntwo")
        await until(lambda: answer.size.height == 3)
        selection = Selection(Offset(1, 0), Offset(2, 2))
        assert answer.get_selection(selection) == ("本 one\n\ntw", "\n")
        plain = answer.render_lines(Region(0, 0, 60, 3))
        pilot.app.screen.selections = {answer: selection}
        marked = answer.render_lines(Region(0, 0, 60, 3))
        assert [line.text for line in marked] == [line.text for line in plain]
        changed = [
            line.crop(0, 2) == old.crop(0, 2) for line, old in zip(marked, plain, strict=True)
        ]
        assert changed == [True, True, False]

    play(story)


@pytest.mark.parametrize("width", [1, 2, 5, 9, 20, 60])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    async def story(answer: GrowingMarkdown, pilot: Pilot[None]) -> None:
        answer.show(MARKDOWN + "\n日本語日本語日本語")
        await until(lambda: answer.size.height > 10)
        for crop in (Region(0, 0, width, 30), Region(width // 2, 3, width - width // 2, 40)):
            lines = answer.render_lines(crop)
            assert [line.cell_length for line in lines] == [crop.width] * crop.height

    play(story, (width, 80))


def test_another_theme_and_another_width_draw_all_of_it_anew() -> None:
    async def story(answer: GrowingMarkdown, pilot: Pilot[None]) -> None:
        answer.show("# Title\n\n" + "word " * 30)
        await until(lambda: answer.size.height == 5)
        before = answer.render_lines(Region(0, 0, 60, 1))
        pilot.app.theme = "textual-light"
        await until(lambda: answer.render_lines(Region(0, 0, 60, 1)) != before)
        await pilot.resize_terminal(30, 80)
        await until(lambda: answer.size.height == 7)
        assert answer.plain.startswith("Title")

    play(story)
