from __future__ import annotations

import pytest

from pagedmlx.errors import first_line, readable_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**41, "2.0 TiB")]
)
def test_sizes_are_for_people(num_bytes: int, text: str) -> None:
    assert readable_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "ValueError"),
        ("\none\ntwo", "one"),
        (
            "2 parameters not in model: \na.weight,\nb.weight.",
            "2 parameters not in model: a.weight,",
        ),
        ("nothing follows:", "nothing follows:"),
    ],
)
def test_what_others_say_becomes_one_line_that_says_something(text: str, line: str) -> None:
    assert first_line(ValueError(text)) == line
