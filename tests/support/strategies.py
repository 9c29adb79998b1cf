"""Hypothesis strategies for the core: small alphabets and tiny pools, so that sharing is forced."""

from __future__ import annotations

from hypothesis import strategies as st

from pagedmlx.core.pooling import Pooling
from pagedmlx.core.prefix import hash_tokens
from pagedmlx.core.request import Request
from tests.support.core import (
    FULL,
    STOP_TOKEN,
    WINDOW,
    Driver,
    NoGrammar,
    constant_hash,
    four_bit_hash,
    make_driver,
    make_request,
)

hash_functions = st.sampled_from([hash_tokens, hash_tokens, four_bit_hash, constant_hash])
kv_groups = st.sampled_from([(FULL,), (FULL,), (FULL, WINDOW)])
block_sizes = st.sampled_from([2, 4])
min_partial_tokens = st.sampled_from([1, 1, 2, 4])
cache_salts = st.sampled_from(["", "", "", "other"])

# Most prompts begin alike and part ways somewhere; some share nothing with those.
_SHARED = (0, 1, 1, 0, 2, 0, 1, 2, 0, 0, 1, 1)


@st.composite
def prompts(draw: st.DrawFn, max_size: int = 12) -> tuple[int, ...]:
    shared = _SHARED[: draw(st.integers(0, max_size))]
    own = draw(st.lists(st.integers(0, 1), max_size=3))
    other = draw(st.sampled_from([(), (), (), (2,), (1, 2)]))
    return (*other, *shared, *own)[:max_size] or (0,)


@st.composite
def requests(draw: st.DrawFn, request_id: str) -> Request:
    pooling = draw(st.sampled_from([None, None, None, None, *Pooling]))
    max_tokens = 1 if pooling else draw(st.integers(1, 10))
    grammar = draw(st.sampled_from([None, None, None if pooling else NoGrammar()]))
    return make_request(
        draw(prompts()),
        max_tokens,
        request_id=request_id,
        n=1 if pooling else draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
        seed=draw(st.integers(0, 3)),
        priority=draw(st.sampled_from([0, 0, 0, 1, 2])),
        cache_salt=draw(cache_salts),
        grammar=grammar,
        # A grammar may end before them.
        min_tokens=0 if grammar else draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.sampled_from([(), (STOP_TOKEN,)])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
        pooling=pooling,
    )


@st.composite
def drivers(draw: st.DrawFn) -> Driver:
    return make_driver(
        draw(st.integers(3, 14) | st.just(40)),
        draw(block_sizes),
        groups=draw(kv_groups),
        window_blocks=draw(st.sampled_from([None, 3, 5, 8])),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        hash_function=draw(hash_functions),
        stop_strings=draw(st.booleans()),
        max_num_seqs=draw(st.sampled_from([8, 8, 4, 2, 1])),
        max_num_batched_tokens=draw(st.sampled_from([64, 19, 14, 11, 8, 5, 3, 2, 1])),
        prefill_chunk_size=draw(st.sampled_from([64, 16, 8, 5, 4, 3, 2, 1])),
        max_overtakes=draw(st.sampled_from([64, 3, 1, 0])),
        max_prompt_logits=draw(st.sampled_from([128, 4, 1])),
        chunk_multiple=draw(st.sampled_from([1, 2, 8])),
        depth=draw(st.sampled_from([0, 1])),
        min_partial_tokens=draw(min_partial_tokens),
    )
