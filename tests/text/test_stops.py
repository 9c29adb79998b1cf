"""StopMatcher: the first complete stop string ends the text, and no part of one is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.text.stops import StopMatcher
from tests.support.texts import cut_at_stop, pieces

_words = st.text("abc", max_size=30)
_stops = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@given(_words, _stops, st.lists(st.integers(0, 30), max_size=8))
def test_text_and_match_are_the_specification_for_any_pieces(text, stops, cuts):
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces(text, cuts)) + matcher.flush()
    assert (shown, matcher.match) == cut_at_stop(text, stops)


@given(_words, _stops, st.lists(st.integers(0, 30), max_size=8))
def test_what_is_shown_is_always_a_beginning_of_the_final_text(text, stops, cuts):
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces(text, cuts):
        shown += matcher.feed(piece)
        assert cut_at_stop(text, stops)[0].startswith(shown)


@given(_words, _words, _stops)
def test_a_match_completed_while_unarmed_is_passed_on_for_good(before, after, stops):
    matcher = StopMatcher(stops)
    shown = matcher.feed(before, armed=False) + matcher.feed(after) + matcher.flush()
    assert (shown, matcher.match) == cut_at_stop(before + after, stops, first=len(before) + 1)


@given(_words, _stops, st.lists(st.integers(0, 30), max_size=8))
def test_an_included_match_is_all_that_comes_on_top(text, stops, cuts):
    matcher = StopMatcher(stops, include=True)
    shown = "".join(matcher.feed(piece) for piece in pieces(text, cuts)) + matcher.flush()
    before, match = cut_at_stop(text, stops)
    assert (shown, matcher.match) == (before + (match or ""), match)


@pytest.mark.parametrize(
    ("stops", "text", "shown", "match"),
    [
        (["own fox"], "the brown fox jumps", "the br", "own fox"),
        (["ab", "abc"], "xxabc", "xx", "ab"),
        (["aab"], "aaab", "a", "aab"),
        (["bc", "abcd"], "xabcd", "xa", "bc"),
        (["b", "ab"], "xab", "x", "ab"),
        ([], "anything", "anything", None),
    ],
)
def test_ties_and_overlaps(stops, text, shown, match):
    matcher = StopMatcher(stops)
    assert "".join(map(matcher.feed, text)) + matcher.flush() == shown
    assert matcher.match == match


def test_text_that_can_be_no_stop_is_not_held_back():
    matcher = StopMatcher(["END"])
    assert matcher.feed("hello E") == "hello "
    assert matcher.feed("X") == "EX"


def test_a_long_stop_string_costs_no_quadratic_time():
    stop = "a" * 20_000 + "b"
    matcher = StopMatcher([stop])
    assert "".join(matcher.feed("a") for _ in range(40_000)) == "a" * 20_000
    assert matcher.feed("b") == ""
    assert matcher.match == stop
