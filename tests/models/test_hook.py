from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations, base, gemma2, llama, qwen3

from pagedmlx.models.flat_rows import FlatRows
from pagedmlx.models.hook import BlockAttention, FlatSwiglu, install_hook
from tests.support.tiny_models import tiny_model

ORIGINAL = base.scaled_dot_product_attention


class PagedCache:
    """Takes every call and answers with a mark of its own; or declines."""

    def __init__(self, declines: bool = False) -> None:
        self.declines = declines
        self.calls: list[tuple[float, Any, Any]] = []

    def attend_blocks(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: Any,
    ) -> mx.array | None:
        self.calls.append((scale, mask, sinks))
        return None if self.declines else mx.full(queries.shape, 7.0)


def call(cache: Any, mask: Any, **more: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    queries, keys, values = (mx.array(rng.normal(size=(1, 2, 3, 4))) for _ in range(3))
    attend = llama.scaled_dot_product_attention
    return np.array(attend(queries, keys, values, cache=cache, scale=0.5, mask=mask, **more))


def test_the_hook_binds_the_model_own_modules_and_undo_restores_them() -> None:
    handle = install_hook(tiny_model("llama").model)
    assert isinstance(llama.scaled_dot_product_attention, BlockAttention)
    assert qwen3.scaled_dot_product_attention is ORIGINAL
    assert base.scaled_dot_product_attention is ORIGINAL
    handle.undo()
    assert llama.scaled_dot_product_attention is ORIGINAL


def test_swiglu_keeps_rows_flat_and_is_restored() -> None:
    original = activations.swiglu
    flat = mx.random.normal((3, 8), key=mx.random.key(0))
    rows, one = FlatRows(flat, (3, 1, 8)), mx.ones((1, 1, 8))
    with install_hook(tiny_model("llama").model):
        assert isinstance(llama.swiglu, FlatSwiglu)
        found = llama.swiglu(rows, FlatRows(flat, (3, 1, 8)))
        assert isinstance(found, FlatRows)
        assert not isinstance(llama.swiglu(flat, flat), FlatRows)
        for gate, x in [(rows, rows), (rows, flat[:, None]), (flat[:, None], rows), (rows, one)]:
            assert mx.array_equal(llama.swiglu(gate, x), original(mx.array(gate), mx.array(x)))
    assert llama.swiglu is original


def test_mlx_lm_keeps_its_own_function_for_models_that_come_later() -> None:
    with install_hook(tiny_model("gpt_oss").model):  # a class of its own lies beside the function
        assert not isinstance(activations.swiglu, FlatSwiglu)


def test_two_users_share_one_hook_and_the_last_one_restores() -> None:
    first = install_hook(tiny_model("llama").model)
    hook = llama.scaled_dot_product_attention
    with install_hook(tiny_model("llama_tied").model):
        assert llama.scaled_dot_product_attention is hook
        first.undo()
        first.undo()
        assert llama.scaled_dot_product_attention is hook
    assert llama.scaled_dot_product_attention is ORIGINAL


def test_a_model_without_that_function_stays_as_it_is() -> None:
    with install_hook(tiny_model("gemma2").model), install_hook(nn.Linear(2, 2)):
        assert not hasattr(gemma2, "scaled_dot_product_attention")


def test_a_name_of_another_spelling_is_found_by_identity() -> None:
    namespace: dict[str, Any] = {"nn": nn, "attend_under_another_name": ORIGINAL}
    source = "class Model(nn.Module):\n    def __call__(self, x):\n        return x\n"
    exec(source, namespace)
    with install_hook(namespace["Model"]()):
        assert isinstance(namespace["attend_under_another_name"], BlockAttention)
    assert namespace["attend_under_another_name"] is ORIGINAL


@pytest.mark.parametrize("mask", [None, mx.ones((3, 3), dtype=mx.bool_), "causal"])
def test_our_cache_is_asked_first_and_knows_the_mask(mask: Any) -> None:
    sinks = mx.zeros(2)
    with install_hook(tiny_model("llama").model):
        cache = PagedCache()
        assert (call(cache, mask, sinks=sinks) == 7.0).all()
        assert cache.calls == [(0.5, mask, sinks)]


def test_other_caches_and_declined_calls_go_to_mlx_lm() -> None:
    expected = call(None, None)
    with install_hook(tiny_model("llama").model):
        np.testing.assert_array_equal(call(None, None), expected)
        np.testing.assert_array_equal(call(object(), None), expected)
        np.testing.assert_array_equal(call(PagedCache(declines=True), None), expected)


def test_arguments_that_the_hook_does_not_know_reach_mlx_lm() -> None:
    with install_hook(tiny_model("llama").model), pytest.raises(TypeError, match="novelty"):
        call(PagedCache(), None, novelty=1)
