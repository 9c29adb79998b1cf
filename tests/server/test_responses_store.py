"""Stored answers stay within bounds, and the ones that were used last stay longest."""

from __future__ import annotations

import pytest

from pagedmlx.server.errors import HttpError
from pagedmlx.server.responses_store import ResponseStore, StoredResponse


def stored(name: str, text: str = "") -> StoredResponse:
    output = [{"id": f"item of {name}", "text": text}]
    return StoredResponse({"id": name, "output": output}, [], [{"role": "user"}])


def test_what_was_used_the_longest_time_ago_goes_first():
    store = ResponseStore(10_000, max_responses=2)
    for name in ("a", "b"):
        store.add("me", stored(name))
    store.get("me", "a")
    store.add("me", stored("c"))
    assert len(store) == 2
    with pytest.raises(HttpError, match="'b'"):
        store.get("me", "b")
    with pytest.raises(HttpError, match="item of b"):
        store.item("me", "item of b", "input[0].id")
    assert store.get("me", "a") == stored("a")
    assert store.item("me", "item of c", "x")["id"] == "item of c"


def test_all_of_them_stay_within_the_bytes():
    store = ResponseStore(1000)
    for number in range(50):
        store.add("me", stored(str(number), "x" * 100))
        assert 0 < store.num_bytes <= 1000
    store.add("me", stored("large", "x" * 1000))
    assert len(store) > 1
    with pytest.raises(HttpError):
        store.get("me", "large")
    for number in range(50 - len(store), 50):
        store.delete("me", str(number))
    assert store.num_bytes == 0


def test_owners_are_apart():
    store = ResponseStore(1000)
    store.add("me", stored("a"))
    for use in (store.get, store.delete):
        with pytest.raises(HttpError):
            use("you", "a")
    with pytest.raises(HttpError):
        store.item("you", "item of a", "x")
    assert len(store) == 1


def test_no_bytes_keep_nothing():
    store = ResponseStore(0)
    store.add("me", stored("a"))
    assert len(store) == 0
