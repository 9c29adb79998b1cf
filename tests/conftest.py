"""Settings that every test shares: no network, a fast BLAS, hypothesis without deadlines."""

from __future__ import annotations

import os

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
