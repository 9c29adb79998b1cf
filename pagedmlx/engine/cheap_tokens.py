"""How many prompt tokens a step takes for the price of a few.

A GPU reads all weights for every step, and the host builds one with prompts anew, so to compute
fewer tokens than that leaves room for gains running streams nothing, and prompts lose by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

from pagedmlx.kv.writer import PoolWriter
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.dummy_steps import make_pool, run_chunk, seconds_for

_HARDLY_MORE = 1.25
_MOST = 256
"""Behind a long context more are no longer cheap."""
_NUM_RUNS = 2
_MEASURING_S = 1.0
"""Where it takes longer, what was found until then holds."""


def measure_cheap_tokens(adapter: ModelAdapter, writer: PoolWriter, few: int, most: int) -> int:
    """Measure on this device what ``find_cheap_tokens`` says.

    Args:
        adapter: Of the model to be served.
        writer: How the pool will be written.
        few: As there; also what is returned where the device has no memory for more.
        most: As there.
    """
    most = min(most, _MOST)
    if 2 * few > most:
        return few
    adapter.rest()
    end = time.monotonic() + _MEASURING_S

    def seconds(num_tokens: int) -> float:
        if time.monotonic() > end:
            return inf

        def run() -> None:
            run_chunk(adapter, num_tokens, store)

        run()  # whatever is made at the first use
        return min(seconds_for(run) for _ in range(_NUM_RUNS))

    try:
        store = make_pool(adapter, most, writer)
        return find_cheap_tokens(seconds, few, most)
    except RuntimeError:  # MLX's
        return few
    finally:
        adapter.rest()
        adapter.drop_store()


def find_cheap_tokens(seconds: Callable[[int], float], few: int, most: int) -> int:
    """Find the most tokens that a step computes in hardly more time than a few.

    Args:
        seconds: What a step with so many tokens of a prompt takes.
        few: Tokens that any step with prompts computes.
        most: What is never exceeded, if ``few`` is not more.

    Returns:
        ``few``, or twice as many, or four times, ..
    """
    bound = _HARDLY_MORE * seconds(few)
    num_tokens = few
    while 2 * num_tokens <= most and seconds(2 * num_tokens) <= bound:
        num_tokens *= 2
    return num_tokens
