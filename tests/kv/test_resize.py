"""Arrays get another length, as many of them together as spare memory allows."""

from __future__ import annotations

import mlx.core as mx
import pytest

from pagedmlx.kv.resize import set_length, with_length

ROW_BYTES = 2 * 3 * 4


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_a_longer_array_has_its_type_and_a_short_one_its_beginning(dtype: mx.Dtype) -> None:
    array = mx.random.normal((5, 2, 3)).astype(dtype)
    assert with_length(array, 5, 0.5) is array
    for length in (1, 4, 6, 50):
        changed = with_length(array, length, 0.5)
        assert (changed.dtype, changed.shape) == (dtype, (length, 2, 3))
        assert mx.array_equal(changed[:5], array[:length])
        assert (changed[5:] == 0.5).all()


@pytest.mark.parametrize(
    ("length", "spare_rows", "together"),
    [
        # Long and short are there at once: so the shorter counts.
        (9, 0, [1, 1, 1, 1, 1]),
        (9, 8, [1, 1, 1, 1, 1]),
        (9, 9, [2, 2, 1]),
        (9, 18, [4, 1]),
        (9, 100, [5]),
        (2, 5, [2, 2, 1]),
        (2, 10, [5]),
        (5, 0, [1, 1, 1, 1, 1]),
    ],
)
def test_as_many_arrays_are_copied_together_as_there_is_memory_for(
    length: int, spare_rows: int, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = [mx.full((rows, 2, 3), float(rows)) for rows in (4, 5, 4, 5, 4)]
    before = [mx.array(each) for each in arrays]
    counts: list[int] = []
    evaluate = mx.eval

    def count(changed: list[mx.array]) -> None:
        counts.append(len(changed))
        evaluate(changed)

    with monkeypatch.context() as patched:
        patched.setattr(mx, "eval", count)
        set_length(arrays, length, 0.5, spare_rows * ROW_BYTES)
    assert counts == together
    for old, new in zip(before, arrays, strict=True):
        kept = min(length, old.shape[0])
        assert new.shape == (length, 2, 3)
        assert mx.array_equal(new[:kept], old[:kept])
        assert (new[kept:] == 0.5).all()
