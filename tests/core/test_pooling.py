from __future__ import annotations

import pytest

from pagedmlx.core.pooling import Pooling
from pagedmlx.core.sequence import FinishReason
from tests.support.core import make_driver, make_request

PROMPT = tuple(range(100, 115))


def test_poolings_name_their_rows() -> None:
    found = {pooling: [list(pooling.rows(count)) for count in (1, 3)] for pooling in Pooling}
    assert found == {
        Pooling.LAST: [[0], [2]],
        Pooling.FIRST: [[0], [0]],
        Pooling.MEAN: [[0], [0, 1, 2]],
    }


@pytest.mark.parametrize("depth", [0, 1])
def test_an_embedding_ends_with_its_prompt_and_shares_what_its_pooling_can_use(depth: int) -> None:
    driver = make_driver(32, 4, prefill_chunk_size=6, depth=depth)
    (text,) = driver.add(make_request(PROMPT, 8, request_id="text"))
    driver.run()
    found = [
        driver.add(make_request(PROMPT, 1, request_id=pooling, pooling=pooling))[0]
        for pooling in Pooling
    ]
    driver.run()
    driver.check_outputs()
    driver.check_empty()
    last, first, mean = found
    assert last.num_cached_tokens > 0
    assert first.num_cached_tokens == mean.num_cached_tokens == 0
    assert all(each.finish_reason is FinishReason.STOP for each in found)
    assert all(each.num_output_tokens == 0 for each in found)
    assert text.num_output_tokens == 8
