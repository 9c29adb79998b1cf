"""Runs the tests over fake runners twice: one step after the other, and one step ahead."""

from __future__ import annotations

import pytest

from tests.support.engines import FakeRunner


@pytest.fixture(params=[0, 1], ids=["in turn", "one ahead"])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many steps a fake runner lets be under way when the next one is dispatched."""
    monkeypatch.setattr(FakeRunner, "depth", request.param)
    return request.param
