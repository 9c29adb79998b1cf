"""Markdown that grows is cut as if it had come whole, and only its end is parsed again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagedmlx.chat.pieces import GrowingText
from pagedmlx.text.visible import visible
from tests.support.chat import MARKDOWN


def kinds(text: GrowingText) -> list[tuple[str, bool, int | None, str]]:
    return [
        (
            piece.tokens[0].type,
            piece.has_gap,
            piece.number,
            "".join(t.content for t in piece.tokens),
        )
        for piece in text.pieces
    ]


def taken(*texts: str) -> GrowingText:
    growing = GrowingText()
    for text in texts:
        growing.take(text)
    return growing


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 25), min_size=1))
def test_a_text_in_any_parts_has_the_pieces_of_the_whole(lengths: list[int]) -> None:
    growing, end = GrowingText(), 0
    while end < len(MARKDOWN):
        end += lengths[end % len(lengths)]
        growing.take(MARKDOWN[:end])
    assert kinds(growing) == kinds(taken(MARKDOWN))


def test_what_is_finished_is_not_parsed_again() -> None:
    growing, longest = GrowingText(), 0
    text = MARKDOWN * 20
    for end in range(0, len(text), 7):
        growing.take(text[:end])
        longest = max(longest, len(growing._source))
    assert longest < len(MARKDOWN) // 2


def test_it_tells_how_many_pieces_are_as_before() -> None:
    growing = GrowingText()
    assert growing.take("one\n\ntwo") == 0
    assert growing.take("one\n\ntwo") is None
    assert growing.take("one\n\ntwo more") == 1
    assert growing.take("other") == 0
    assert len(growing.pieces) == 1


def test_items_keep_their_numbers_and_have_no_gap_between_them() -> None:
    growing = taken("Look:\n\n7. a\n8. b", "Look:\n\n7. a\n8. b\n8. c\n\n- d")
    assert [piece.number for piece in growing.pieces] == [None, 7, 8, 9, None]
    assert [piece.has_gap for piece in growing.pieces] == [True, True, False, False, True]


def test_the_code_of_a_piece_is_found() -> None:
    growing = taken("- item\n\n  ```py\n  x = 1\n  ```\n\ntext")
    assert [piece.code for piece in growing.pieces] == ["x = 1", None]


def test_line_ends_may_come_in_halves_and_nothing_steers_the_terminal() -> None:
    growing = taken("a\r", "a\r\n\r\nb\x1b[31m")
    assert [kind[3] for kind in kinds(growing)] == ["a", "b\ufffd[31m"]
    assert visible("a\tb\nc\x9b") == "a\tb\nc\ufffd"
