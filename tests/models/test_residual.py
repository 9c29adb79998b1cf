"""Products add themselves to the residual stream, and nobody can tell by the results."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

from pagedmlx.engine import build
from pagedmlx.models.fused import fuse_projections
from pagedmlx.models.loader import LoadedModel
from pagedmlx.models.residual import AddingLinear, Product, add_in_products
from pagedmlx.models.weights import named_parameters
from tests.support.graphs import operations
from tests.support.greedy import Runs, run_every_way
from tests.support.tiny_models import (
    CONFIGS,
    GATHERED,
    HYBRID,
    VOCAB_SIZE,
    tiny_model,
)

NUM_LAYERS = 4
# Attention and MLP add one product each; what isn't named here saves both additions.
SAVED = {
    # A norm is behind their products, or a bias within.
    **dict.fromkeys(("gemma3_text", "gemma4_text", "olmo3", "gpt_oss"), 0),
    # Of attention's product and the MLP's, one adds the other.
    "cohere2": NUM_LAYERS,
    # What experts give is weighted.
    **dict.fromkeys(("mixtral", "qwen3_moe", "qwen3_5"), NUM_LAYERS),
    "falcon_h1": 3 * NUM_LAYERS,  # state, attention and MLP
    "mamba2": NUM_LAYERS,  # it has no MLP
}


def logits_of(model: Any, length: int = 20) -> np.ndarray:
    """A prompt, then one token, over mlx-lm's own caches."""
    caches = make_prompt_cache(model)
    logits = [model(mx.arange(length)[None], cache=caches), model(mx.array([[7]]), cache=caches)]
    return np.array(mx.concatenate(logits, axis=1)[0].astype(mx.float32))


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    expected = np.array(expected)
    np.testing.assert_allclose(
        np.array(found), expected, rtol=0, atol=tolerance * np.abs(expected).max()
    )


def adding_of(model: nn.Module) -> list[AddingLinear]:
    return [module for module in model.modules() if isinstance(module, AddingLinear)]


@pytest.mark.parametrize("name", [*sorted(CONFIGS), *GATHERED, *HYBRID])
@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
def test_a_model_gives_the_same_logits_from_the_same_bytes(name: str, is_fused: bool) -> None:
    model = tiny_model(name).model
    if is_fused:
        fuse_projections(model)
    expected, weights = logits_of(model), named_parameters(model)
    assert add_in_products(model) == SAVED.get(name, 2 * NUM_LAYERS)
    assert_close(logits_of(model), expected)
    found = named_parameters(model)
    assert [key for key, _ in found] == [key for key, _ in weights]
    assert all(a is b for (_, a), (_, b) in zip(found, weights, strict=True))


@pytest.mark.parametrize("name", ["llama", "cohere2", "qwen3_5"])
def test_a_second_time_changes_nothing(name: str) -> None:
    model = tiny_model(name).model
    add_in_products(model)
    before = adding_of(model)
    assert before
    expected = logits_of(model)
    assert add_in_products(model) == 0
    assert [id(each) for each in adding_of(model)] == [id(each) for each in before]
    np.testing.assert_array_equal(logits_of(model), expected)


def test_projections_can_be_joined_afterwards_too() -> None:
    model = tiny_model("qwen2").model
    expected = logits_of(model)
    assert add_in_products(model) == 2 * NUM_LAYERS
    assert fuse_projections(model) == 3 * NUM_LAYERS
    assert_close(logits_of(model), expected)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_in_half_precision_logits_are_as_near_to_the_exact_ones(dtype: mx.Dtype) -> None:
    model = tiny_model("qwen2").model
    model.set_dtype(dtype)
    plain = logits_of(model)
    add_in_products(model)
    found = logits_of(model)
    model.set_dtype(mx.float32)
    exact = logits_of(model)
    assert np.abs(found - exact).max() < 1.5 * np.abs(plain - exact).max()


@pytest.mark.parametrize("name", [*sorted(CONFIGS), *GATHERED, *HYBRID])
def test_each_product_is_computed_once_alone_or_with_its_sum(name: str) -> None:
    model: Any = tiny_model(name).model

    def graph() -> Counter[str]:
        return operations(model(mx.arange(9)[None], cache=make_prompt_cache(model)))

    before = graph()
    num_saved = add_in_products(model)
    after = graph()
    assert after["AddMM"] - before["AddMM"] == num_saved
    assert before["Matmul"] - after["Matmul"] == num_saved
    assert before["Add"] - after["Add"] == num_saved


def test_one_row_is_multiplied_and_then_added() -> None:
    model: Any = tiny_model().model
    add_in_products(model)
    graph = operations(model(mx.array([[7]]), cache=make_prompt_cache(model)))
    assert graph["AddMM"] == 0
    layer = AddingLinear(mx.ones((8, 8)))
    for shape in [(8,), (1, 8), (1, 1, 8)]:
        assert not isinstance(layer(mx.ones(shape)), Product)


def test_a_model_is_still_one_for_mlx_lm() -> None:
    model = tiny_model("llama_tied").model
    prompt = mx.arange(3, 20)
    expected = [token for token, _ in generate_step(prompt, model, max_tokens=8)]
    add_in_products(model)
    assert [token for token, _ in generate_step(prompt, model, max_tokens=8)] == expected


def test_the_layers_and_the_model_are_given_back_without_the_garbage_collector() -> None:
    model: Any = tiny_model().model
    layer = weakref.ref(model.layers[0].self_attn.o_proj)
    gc.collect()
    gc.disable()
    try:
        add_in_products(model)
        assert layer() is None
        logits_of(model)
        adding = weakref.ref(adding_of(model)[0])
        del model
        assert adding() is None
    finally:
        gc.enable()


def test_it_takes_no_memory() -> None:
    model = tiny_model().model
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    add_in_products(model)
    assert mx.get_active_memory() == before
    assert mx.get_peak_memory() <= before + 1024


# Which layers a model lets add their products.


class Stack(nn.Module):
    """A whole model of two layers, called in whatever way a test wants."""

    def __init__(self, call: Callable[[Any, mx.array], mx.array], **layers: nn.Module) -> None:
        super().__init__()
        self.layers = [nn.Module()]
        block = self.layers[0]
        for name in ("first", "second"):
            block[name] = layers.get(name) or nn.Linear(64, 64, bias=False)
        self.call = call

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        x = mx.random.normal((*ids.shape, 64), key=mx.random.key(0))
        return self.call(self.layers[0], x)


class OtherLinear(nn.Linear):
    """Might do anything."""


def usual(b: Any, x: mx.array) -> mx.array:
    return x + b.first(x)


def quantised() -> Stack:
    return Stack(usual, first=nn.Linear(64, 64, bias=False).to_quantized(group_size=32))


def changed_in_place(b: Any, x: mx.array) -> mx.array:
    y = b.first(x)
    y *= 2
    return x + y


def stream_in_place(b: Any, x: mx.array) -> mx.array:
    y = x * 1
    y += b.first(x)
    return y


def added_twice(b: Any, x: mx.array) -> mx.array:
    y = b.first(x)
    return (x + y) * (2 * x + y)


def one_twice_the_other_never(b: Any, x: mx.array) -> mx.array:
    y = b.first(x)
    return (x + y) * (2 * x + y) + mx.exp(b.first(2 * x))


UNTOUCHED: dict[str, Callable[[], Stack]] = {
    "a subclass": lambda: Stack(usual, first=OtherLinear(64, 64, bias=False)),
    "a bias": lambda: Stack(usual, first=nn.Linear(64, 64)),
    "quantised": quantised,
    "a norm behind it": lambda: Stack(lambda b, x: x + mx.fast.rms_norm(b.first(x), None, 1e-5)),
    "a multiplier": lambda: Stack(lambda b, x: x + 0.5 * b.first(x)),
    "not called": lambda: Stack(lambda b, x: x + 1),
    "one call of two added": lambda: Stack(lambda b, x: (x + b.first(x)) * b.first(x)),
    "added twice": lambda: Stack(added_twice),
    "one added twice, one never": lambda: Stack(one_twice_the_other_never),
    "changed in place": lambda: Stack(changed_in_place),
    "the stream in place": lambda: Stack(stream_in_place),
    "mx.add": lambda: Stack(lambda b, x: mx.add(x, b.first(x))),
    "one row": lambda: Stack(lambda b, x: x[:, -1:] + b.first(x[:, -1:])),
    "another shape": lambda: Stack(lambda b, x: x[:, :1] + b.first(x)),
    "another type": lambda: Stack(lambda b, x: x.astype(mx.float16) + b.first(x)),
    "a number": lambda: Stack(lambda b, x: 1 + b.first(x)),
}


@pytest.mark.parametrize("what", UNTOUCHED)
def test_what_is_not_always_added_stays_as_it_is(what: str) -> None:
    model: Any = UNTOUCHED[what]()
    block = model.layers[0]
    before, expected = dict(block), model(mx.zeros((1, 5)))
    assert add_in_products(model) == 0
    assert list(block) == list(before)
    assert all(block[name] is before[name] for name in before)
    assert mx.array_equal(model(mx.zeros((1, 5))), expected)


TOUCHED: dict[str, tuple[int, Callable[[Any, mx.array], mx.array]]] = {
    "the usual way": (1, usual),
    "the product first": (1, lambda b, x: b.first(x) + x),
    "two in turn": (2, lambda b, x: x + b.first(x) + b.second(x)),
    "one to the other": (1, lambda b, x: x + (b.first(x) + b.second(x))),
    "called twice and added twice": (2, lambda b, x: x + b.first(x) + b.first(2 * x)),
    "its weights looked at": (1, lambda b, x: x.astype(b.first.weight.dtype) + b.first(x)),
}


@pytest.mark.parametrize("what", TOUCHED)
def test_what_is_always_added_adds_itself(what: str) -> None:
    num_saved, call = TOUCHED[what]
    model: Any = Stack(call)
    expected = model(mx.zeros((1, 5)))
    assert add_in_products(model) == num_saved
    found = model(mx.zeros((1, 5)))
    graph = operations(found)
    assert graph["AddMM"] == num_saved
    assert_close(found, expected)


def test_a_layer_of_two_modules_adds_itself_where_it_is_added() -> None:
    model: Any = Stack(lambda b, x: (x + b.first(x)) * b.second(x))
    block = model.layers[0]
    block.second = block.first
    shared, expected = block.first, model(mx.zeros((1, 5)))
    assert add_in_products(model) == 1
    assert block.second is shared
    assert block.first.weight is shared.weight
    assert_close(model(mx.zeros((1, 5))), expected)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=repr)
def test_a_model_that_can_not_run_is_left_untouched(error: BaseException) -> None:
    def call(block: Any, x: mx.array) -> mx.array:
        assert type(x + block.first(x)) is mx.array
        raise error

    model = Stack(call)
    block = model.layers[0]
    before = dict(block)
    if isinstance(error, Exception):
        assert add_in_products(model) == 0
    else:
        with pytest.raises(KeyboardInterrupt):
            add_in_products(model)
    assert list(block) == list(before)
    assert all(block[name] is before[name] for name in before)


def test_a_quantised_model_is_left_untouched() -> None:
    model = tiny_model().model
    nn.quantize(
        model,
        group_size=32,
        class_predicate=lambda _, module: (
            hasattr(module, "to_quantized") and module["weight"].shape[-1] % 32 == 0
        ),
    )
    # Rows of 48, which are the MLPs', stay as they are.
    expected = logits_of(model)
    assert add_in_products(model) == NUM_LAYERS
    assert_close(logits_of(model), expected)


def test_within_a_lora_layer_the_layer_adds_itself_to_what_was_trained() -> None:
    trained = LoRALinear.from_base(nn.Linear(64, 64, bias=False))
    trained.lora_b = mx.full(trained.lora_b.shape, 0.5)
    model: Any = Stack(lambda b, x: x + b.first(x), first=trained)
    expected = model(mx.zeros((1, 5)))
    assert add_in_products(model) == 1
    assert type(trained.linear) is AddingLinear
    assert_close(model(mx.zeros((1, 5))), expected)


# Engines.


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``build_engine`` alone takes the device for a GPU; there is none to compute on."""
    seen = {**vars(mx), "default_device": lambda: mx.Device(mx.gpu)}
    monkeypatch.setattr(build, "mx", SimpleNamespace(**seen))


def run_on_a_thread(make: Callable[[], LoadedModel], depth: int) -> tuple[Runs, int]:
    results: list[tuple[Runs, int]] = []

    def run() -> None:
        loaded = make()
        # What is expected is computed before the engine comes.
        runs = run_every_way(loaded, VOCAB_SIZE, depth)
        results.append((runs, len(adding_of(loaded.model))))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize(
    ("name", "depth"), [("qwen2", 1), ("cohere2", 0), ("deepseek_v3", 0), ("qwen3_5", 1)]
)
@pytest.mark.usefixtures("a_gpu")
def test_an_engine_on_a_gpu_uses_it_and_gives_the_same_tokens(name: str, depth: int) -> None:
    runs, num_adding = run_on_a_thread(lambda: tiny_model(name), depth)
    assert runs.equal == {"batch": True, "again": True, "alone": True, "forks": True}
    assert num_adding == SAVED.get(name, 2 * NUM_LAYERS)


def test_an_engine_on_the_cpu_keeps_the_models_own_sums() -> None:
    runs, num_adding = run_on_a_thread(tiny_model, 0)
    assert runs.equal == {"batch": True, "again": True, "alone": True, "forks": True}
    assert num_adding == 0
