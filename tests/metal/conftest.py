"""Counts of the variants that were checked and executed, told at the end of a run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

_COUNTS = pytest.StashKey[Counter[str]]()


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Counter[str]:
    """Add to a line's number, by its text."""
    return request.config.stash.setdefault(_COUNTS, Counter())


class CountsOfWorkers:
    """Brings the counts of several processes together, where tests run in some at once."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended."""
        counts = node.config.stash.setdefault(_COUNTS, Counter())
        counts.update(getattr(node, "workeroutput", {}).get("metal_counts", {}))


def pytest_configure(config: pytest.Config) -> None:
    """Runs in each process."""
    config.pluginmanager.register(CountsOfWorkers())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Runs in each process; a worker hands its counts on."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["metal_counts"] = dict(session.config.stash.get(_COUNTS, Counter()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = terminalreporter.config.stash.get(_COUNTS, Counter())
    if counts:
        terminalreporter.section("Metal kernels")
        for text, number in counts.items():
            terminalreporter.write_line(f"{number} {text}")
