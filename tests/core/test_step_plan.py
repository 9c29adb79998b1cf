"""Chunks end at round positions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.core.step_plan import aligned


@given(start=st.integers(0, 5000), num_tokens=st.integers(1, 3000), power=st.integers(0, 10))
def test_a_chunk_ends_at_the_roundest_position_that_leaves_half_of_it(
    start: int, num_tokens: int, power: int
) -> None:
    found = aligned(start, num_tokens, 1 << power)
    assert num_tokens <= 2 * found <= 2 * num_tokens
    ends = range(start + -(-num_tokens // 2), start + num_tokens + 1)

    def roundness(end: int) -> int:
        return min(end & -end, 1 << power)

    assert roundness(start + found) == max(map(roundness, ends))
