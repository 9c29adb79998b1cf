"""Counts of the variants that were checked and executed, told at the end of a run."""

from __future__ import annotations

from collections import Counter

import pytest

_COUNTS = pytest.StashKey[Counter[str]]()


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Counter[str]:
    """Add to a line's number, by its text."""
    return request.config.stash.setdefault(_COUNTS, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = terminalreporter.config.stash.get(_COUNTS, Counter())
    if counts:
        terminalreporter.section("Metal kernels")
        for text, number in counts.items():
            terminalreporter.write_line(f"{number} {text}")
