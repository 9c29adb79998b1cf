from __future__ import annotations

import pytest

from pagedmlx.errors import readable_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**41, "2.0 TiB")]
)
def test_sizes_are_for_people(num_bytes: int, text: str) -> None:
    assert readable_bytes(num_bytes) == text
