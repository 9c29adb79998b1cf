"""One server over a fake engine for the tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engines import make_engine
from tests.support.server import RunningServer, serving


@pytest.fixture(scope="module")
def _shared() -> Iterator[RunningServer]:
    with serving(lambda: make_engine(num_blocks=256, max_model_len=512)) as server:
        yield server


@pytest.fixture
def server(_shared: RunningServer) -> Iterator[RunningServer]:
    yield _shared
    _shared.assert_idle()
