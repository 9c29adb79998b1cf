"""Reasoning is told from the answer at every moment, and code is found in it."""

from __future__ import annotations

import pytest

from pagedmlx.chat.reasoning import Parts, code_blocks, split_reasoning


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", Parts("", "")),
        ("Hello", Parts("", "Hello")),
        ("<", Parts("", "", is_thinking=True)),
        ("<think", Parts("", "", is_thinking=True)),
        ("<thin ice", Parts("", "<thin ice")),
        ("<think>", Parts("", "", is_thinking=True)),
        ("<think>\nhm", Parts("hm", "", is_thinking=True)),
        ("<think>\nhm\n</think>\n\nYes", Parts("hm", "Yes")),
        ("\n<think>hm</think>Yes", Parts("hm", "Yes")),
        ("hm, so\n</think>\n\nYes", Parts("hm, so", "Yes")),
        ("use <think> in text", Parts("", "use <think> in text")),
    ],
)
def test_reasoning_is_what_is_between_the_tags_at_the_beginning(text: str, parts: Parts) -> None:
    assert split_reasoning(text) == parts


def test_code_blocks_are_found_also_when_the_last_is_still_open() -> None:
    text = "a\n```python\nx = 1\n\ny = 2\n```\nb\n~~~\nz\n~~~\n```\nopen"
    assert code_blocks(text) == ["x = 1\n\ny = 2", "z", "open"]
    assert code_blocks("no code, only `x`") == []
