"""What every test shares: no network, a fast BLAS, hypothesis without deadlines, counts.

The counts of Metal kernels that were checked and executed are told at the end of a run. They are
here because of several processes only this file is read by the one that tells.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from pagedmlx.models.blas import load_fast_blas

# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before any test imports mlx.
load_fast_blas()

settings.register_profile(
    "default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--metal-full",
        action="store_true",
        help="execute every variant of the Metal kernels, not only a covering set",
    )


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
