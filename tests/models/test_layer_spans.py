"""Spans of layers, one after the other, are the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache

from pagedmlx.models import layer_spans
from pagedmlx.models.layer_spans import LayerSpans, layers_in_a_chain
from tests.support.tiny_models import CONFIGS, GATHERED, HYBRID, tiny_model

# Layers that share K and V with others, or are given a result of the first one.
UNCUT = {"gemma4_text", "rwkv7"}


class Chain(nn.Module):
    """Like a model of mlx-lm, with layers that double and add what they were given besides."""

    def __init__(self, go: Callable[..., mx.array], num_layers: int = 4) -> None:
        super().__init__()
        self.model = Body(go, num_layers)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return self.model(inputs, cache)

    @property
    def layers(self) -> list[Any]:
        return self.model.layers

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self.layers]


class Body(nn.Module):
    def __init__(self, go: Callable[..., mx.array], num_layers: int) -> None:
        super().__init__()
        self.layers = [Layer() for _ in range(num_layers)]
        self._go = go

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        return self._go(self.layers, inputs, cache)


class Layer(nn.Module):
    def __call__(self, x: mx.array, extra: Any = None, cache: Any = None) -> mx.array:
        x = 2 * x
        return x if extra is None else x + extra


def by_spans(spans: LayerSpans, ranges: Iterable[range], model: Any) -> np.ndarray:
    """Logits of a prompt and two tokens, each span over caches as they were before the step."""
    caches = make_prompt_cache(model)
    found = []
    for tokens in (mx.arange(9)[None], mx.array([[3]]), mx.array([[5]])):
        output, after = tokens, list(caches)
        for span in ranges:
            mine = copy.deepcopy(caches)
            output = spans.run(span, output, lambda m=mine, t=tokens: model(t, cache=m))
            after[span.start : span.stop] = mine[span.start : span.stop]
        caches = after
        found.append(output[:, -1])
    return np.array(mx.concatenate(found).astype(mx.float32))


@pytest.mark.parametrize("name", [*CONFIGS, *GATHERED, *HYBRID])
def test_spans_come_to_what_the_whole_model_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_spans, "FIRST_SPAN", 1)
    model: Any = tiny_model(name).model
    layers = list(model.layers)
    spans = LayerSpans(layers_in_a_chain(model))
    if name in UNCUT:
        assert spans.parts == (spans.whole,)
        return
    assert len(spans.parts) > 1
    expected = by_spans(spans, [spans.whole], model)
    found = by_spans(spans, spans.parts, model)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    assert all(a is b for a, b in zip(model.layers, layers, strict=True))


@given(st.integers(0, 200))
def test_spans_cover_all_layers_and_the_next_one_is_never_too_long(num_layers: int) -> None:
    parts = list(layer_spans._cut(num_layers))
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    sizes = [len(part) for part in parts]
    for number, (before, after) in enumerate(pairwise(sizes), 2):
        is_last = number == len(sizes)
        full = min(before + (before + 1) // 2, layer_spans.LONGEST_SPAN)
        assert before / 2 < after <= 1.5 * full if is_last else after == full
    assert not sizes or sizes[0] <= layer_spans.FIRST_SPAN * 1.5


def test_a_layer_that_fails_leaves_the_model_as_it_was() -> None:
    model: Any = tiny_model().model
    spans, layers = LayerSpans(layers_in_a_chain(model)), list(model.layers)

    def fail() -> mx.array:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        spans.run(range(1, 2), mx.zeros((1, 1, 32)), fail)
    assert all(a is b for a, b in zip(model.layers, layers, strict=True))


def go(
    step: Callable[..., mx.array], end: Callable[..., mx.array] = lambda state, x: x
) -> Callable[..., mx.array]:
    """A body that goes through its layers by ``step(state, index, layer, x, cache)``."""

    def body(layers: list[Any], inputs: mx.array, cache: Any) -> mx.array:
        state = SimpleNamespace(seen=[], shared=inputs[..., None] + 1.0)
        x = inputs[..., None] + 0.0
        for index, layer in enumerate(layers):
            x = step(state, index, layer, x, cache[index])
            state.seen.append(x)
        return end(state, x)

    return body


def plain_step(state: Any, index: int, layer: Any, x: mx.array, cache: Any) -> mx.array:
    return layer(x, None, cache)


PLAIN = go(plain_step)
MASKED = go(lambda state, index, layer, x, cache: layer(x, extra=state.shared, cache=cache))
REFUSED = {
    "the first layer's result": go(
        lambda state, index, layer, x, cache: layer(x, state.seen[0] if index else None, cache)
    ),
    "something made between layers": go(
        lambda state, index, layer, x, cache: layer(x, x + 1 if index else state.shared, cache)
    ),
    "a list": go(lambda state, index, layer, x, cache: layer(x, None, [cache])),
    "the first layer's result at the end": go(
        lambda state, index, layer, x, cache: layer(x, None, cache),
        end=lambda state, x: x + state.seen[0],
    ),
    "something added in place between layers": go(
        lambda state, index, layer, x, cache: layer(x.__iadd__(1), None, cache)
    ),
    "something between layers": go(lambda state, index, layer, x, cache: layer(x + 1, None, cache)),
    "layers in another order": lambda layers, inputs, cache: PLAIN(layers[::-1], inputs, cache),
    "layers twice": lambda layers, inputs, cache: PLAIN(layers * 2, inputs, cache * 2),
    "one cache for all": lambda layers, inputs, cache: PLAIN(layers, inputs, cache[:1] * 4),
    "no layer at all": lambda layers, inputs, cache: inputs[..., None] * 1.0,
    "an error": lambda layers, inputs, cache: PLAIN(layers, inputs, []),
}


EMBEDDED = go(
    lambda state, index, layer, x, cache: layer(x, state.shared, cache),
    end=lambda state, x: x + state.shared,
)


# Whatever follows the last layer is not the spans' business.
SCALED = go(plain_step, end=lambda state, x: x.__imul__(3))
NORMED = go(plain_step, end=lambda state, x: x / mx.sqrt((x * x).sum(-1, keepdims=True)))


@pytest.mark.parametrize("body", [PLAIN, MASKED, EMBEDDED, SCALED, NORMED])
def test_what_all_layers_are_given_is_no_result_of_one(body: Callable[..., mx.array]) -> None:
    model = Chain(body)
    spans = LayerSpans(layers_in_a_chain(model))
    assert spans.parts == (range(2), range(2, 4))
    assert (
        by_spans(spans, spans.parts, model).tolist()
        == by_spans(spans, [spans.whole], model).tolist()
    )


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_pass_more_than_one_array_on_are_left_whole(name: str) -> None:
    spans = LayerSpans(layers_in_a_chain(Chain(REFUSED[name])))
    assert spans.parts == (spans.whole,)


def test_a_model_whose_layers_are_others_by_now_is_not_run_in_spans() -> None:
    model = Chain(PLAIN)
    spans = LayerSpans(layers_in_a_chain(model))
    model.model.layers = list(model.model.layers)
    with pytest.raises(IndexError):
        by_spans(spans, spans.parts, model)


def test_a_model_without_a_list_of_layers_is_left_whole() -> None:
    spans = LayerSpans(layers_in_a_chain(nn.Linear(2, 2)))
    assert spans.parts == (spans.whole,)
    assert spans.run(spans.whole, mx.zeros(2), lambda: mx.ones(3)).tolist() == [1] * 3
