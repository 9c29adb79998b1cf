from __future__ import annotations

import numpy as np
import pytest

from pagedmlx.ops.context import find_context
from tests.support.batches import make_batch, slots_of

BLOCK_SIZE, NUM_BLOCKS = 4, 40


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("spans", [[(7, 1), (2, 1), (12, 1)], [(3, 6)], [(0, 9)]])
def test_rows_see_their_own_tokens_in_order(spans: list[tuple[int, int]], window: int | None):
    rng = np.random.default_rng(0)
    host = make_batch(spans, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, rng=rng)
    context = find_context(host, 0, window, BLOCK_SIZE)
    length = spans[0][1]
    num_tokens = context.slots.shape[1]
    mask = np.ones((len(spans), 1, length, num_tokens), bool)
    if context.mask is not None:
        mask = np.array(context.mask).reshape(mask.shape)
    for index, (start, _) in enumerate(spans):
        all_slots = slots_of(host, 0, index, BLOCK_SIZE)
        for row in range(length):
            end = start + row + 1
            low = 0 if window is None else max(0, end - window)
            seen = np.array(context.slots)[index][mask[index, 0, row]]
            assert seen.tolist() == all_slots[low:end].tolist()
        # No slot is read that isn't the sequence's own.
        assert set(np.array(context.slots)[index].tolist()) <= set(all_slots.tolist())


def test_masks_have_the_form_that_mlx_lms_own_caches_give():
    def shape(spans: list[tuple[int, int]], mask_ndim: int = 4) -> tuple[int, ...] | None:
        rng = np.random.default_rng(0)
        host = make_batch(spans, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, rng=rng)
        mask = find_context(host, 0, None, BLOCK_SIZE, mask_ndim=mask_ndim).mask
        return None if mask is None else mask.shape

    assert shape([(6, 1)]) is None
    assert shape([(6, 1), (6, 1)]) is None
    assert shape([(6, 1), (9, 1)]) == (2, 1, 1, 10)
    assert shape([(6, 1), (9, 1)], mask_ndim=5) == (2, 1, 1, 1, 10)
    assert shape([(2, 3)]) == (3, 5)


def test_a_model_may_mask_to_less_than_the_cache_keeps():
    rng = np.random.default_rng(0)
    host = make_batch([(7, 1)], block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, rng=rng)
    context = find_context(host, 0, None, BLOCK_SIZE, mask_window=3)
    assert context.slots.shape == (1, 8)
    assert context.mask is not None
    assert context.mask[0].tolist() == [False] * 5 + [True] * 3
