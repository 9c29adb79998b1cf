"""Layers that read the same input are one product, and nobody can tell by the results."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.dummy_steps import make_pool, run_chunk
from pagedmlx.models.fused import JoinedLinear, LinearPart, fuse_projections
from pagedmlx.models.loader import LoadedModel
from pagedmlx.models.weights import named_parameters
from pagedmlx.ops import make_backend
from tests.support import tiny_models
from tests.support.greedy import Runs, run_every_way
from tests.support.tiny_models import (
    CONFIGS,
    GATHERED,
    HYBRID,
    VOCAB_SIZE,
    build_model,
    tiny_model,
)

NUM_LAYERS = 4
# Of q, k and v two products, of gate and up one; what isn't named here saves all three.
SAVED = {
    **dict.fromkeys(("qwen3_moe", "mixtral", "gpt_oss"), 2 * NUM_LAYERS),  # experts stay
    "gemma4_text": NUM_LAYERS + 2 * 2,  # its last two layers take K and V of others
    "deepseek_v3": NUM_LAYERS,
    "kimi_linear": 2 * 2 + NUM_LAYERS,  # the other two attend over a compressed K and V
    "qwen3_5": NUM_LAYERS + 2 * 2,
    "lfm2": 2 * 2,
    **dict.fromkeys(("phi3", "mamba2", "rwkv7"), 0),
}


def logits_of(model: Any, length: int = 20) -> np.ndarray:
    """A prompt, then one token, over mlx-lm's own caches."""
    caches = make_prompt_cache(model)
    logits = [model(mx.arange(length)[None], cache=caches), model(mx.array([[7]]), cache=caches)]
    return np.array(mx.concatenate(logits, axis=1)[0])


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    expected = np.array(expected)
    np.testing.assert_allclose(
        np.array(found), expected, rtol=0, atol=tolerance * np.abs(expected).max()
    )


def joined_of(model: nn.Module) -> list[JoinedLinear]:
    return [module for module in model.modules() if isinstance(module, JoinedLinear)]


def quantised(name: str = "llama", **settings: Any) -> LoadedModel:
    """Rows of 32 are one group; those of 48 stay as they are."""
    loaded = tiny_model(name)
    nn.quantize(
        loaded.model,
        group_size=32,
        **settings,
        class_predicate=lambda _, module: (
            hasattr(module, "to_quantized") and module["weight"].shape[-1] % 32 == 0
        ),
    )
    return loaded


@pytest.mark.parametrize("name", [*sorted(CONFIGS), *GATHERED, *HYBRID])
def test_a_fused_model_gives_the_same_logits_from_the_same_bytes(name: str) -> None:
    model = tiny_model(name).model
    expected, weights = logits_of(model), dict(named_parameters(model))
    assert fuse_projections(model) == SAVED.get(name, 3 * NUM_LAYERS)
    assert_close(logits_of(model), expected)
    found = named_parameters(model)
    assert sum(a.nbytes for _, a in found) == sum(a.nbytes for a in weights.values())
    assert fuse_projections(model) == 0


@pytest.mark.parametrize("settings", [{}, {"bits": 8}, {"mode": "mxfp4"}], ids=str)
def test_quantised_layers_are_joined_as_they_are(settings: dict[str, Any]) -> None:
    model = quantised("qwen2", **settings).model
    expected = logits_of(model)
    assert fuse_projections(model) == 3 * NUM_LAYERS
    assert all(type(each.linear) is nn.QuantizedLinear for each in joined_of(model))
    assert_close(logits_of(model), expected)


@pytest.mark.parametrize("make", [tiny_model, quantised])
def test_each_part_multiplies_as_its_layer_did_and_shows_its_arrays(
    make: Callable[[str], LoadedModel],
) -> None:
    model: Any = make("qwen2").model
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    names = ("q_proj", "k_proj", "v_proj")
    layers = [*(attention[name] for name in names), mlp.gate_proj, mlp.up_proj]
    x = mx.random.normal((5, 1, 32), key=mx.random.key(0))
    assert fuse_projections(model) == 3 * NUM_LAYERS
    parts = [*(attention[name] for name in names), mlp.gate_proj, mlp.up_proj]
    for part, layer in zip(parts, layers, strict=True):
        assert isinstance(part, LinearPart)
        assert_close(part(x), layer(x), 1e-6)
        for name in ("weight", "bias", "scales", "biases"):
            assert hasattr(part, name) == (layer.get(name) is not None)
            if hasattr(part, name):
                np.testing.assert_array_equal(np.array(getattr(part, name)), np.array(layer[name]))


def test_parts_in_any_order_and_with_other_inputs_stay_right() -> None:
    model: Any = tiny_model("qwen2").model
    names = ("q_proj", "k_proj", "v_proj")
    layers = [model.layers[0].self_attn[name] for name in names]
    fuse_projections(model)
    parts = [model.layers[0].self_attn[name] for name in names]
    inputs = [mx.random.normal((1, 3, 32), key=mx.random.key(seed)) for seed in range(2)]
    for part, which in [(2, 0), (0, 1), (0, 1), (1, 0), (2, 1), (1, 1), (0, 0), (0, 1)]:
        assert_close(parts[part](inputs[which]), layers[part](inputs[which]), 1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma3n", "qwen3_5"])
def test_nothing_is_kept_after_a_pass(name: str) -> None:
    model = tiny_model(name).model
    fuse_projections(model)
    logits_of(model)
    assert joined_of(model)
    assert not any(each._waiting for each in joined_of(model))


def test_pieces_that_nobody_asks_for_go_with_their_input() -> None:
    model: Any = tiny_model().model
    fuse_projections(model)
    x = mx.ones((1, 1, 32))
    model.layers[0].mlp.up_proj(x)
    (joined,) = joined_of(model.layers[0].mlp)
    assert joined._waiting
    del x
    assert joined._waiting is None


def test_the_layers_and_the_model_are_given_back_without_the_garbage_collector() -> None:
    model: Any = tiny_model().model
    layer = weakref.ref(model.layers[0].self_attn.k_proj)
    gc.collect()
    gc.disable()
    try:
        fuse_projections(model)
        assert layer() is None
        logits_of(model)
        joined = weakref.ref(joined_of(model)[0])
        del model
        assert joined() is None
    finally:
        gc.enable()


def test_layers_are_joined_with_the_memory_of_one_of_them() -> None:
    model = tiny_model().model
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    fuse_projections(model)
    largest = max(each.linear["weight"].nbytes for each in joined_of(model))
    assert mx.get_active_memory() <= before + 1024
    assert mx.get_peak_memory() <= before + largest + 1024


def test_parts_can_be_compiled() -> None:
    model: Any = tiny_model().model
    fuse_projections(model)
    attention = model.layers[0].self_attn

    def project(x: mx.array) -> list[mx.array]:
        return [layer(x) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]

    compiled = mx.compile(project)
    for seed in range(3):
        x = mx.random.normal((3, 1, 32), key=mx.random.key(seed))
        for found, expected in zip(compiled(x), project(x), strict=True):
            assert_close(found, expected)
    assert not any(each._waiting for each in joined_of(model))


def test_a_fused_model_is_still_one_for_mlx_lm() -> None:
    model = tiny_model("llama_tied").model
    prompt = mx.arange(3, 20)
    expected = [token for token, _ in generate_step(prompt, model, max_tokens=8)]
    fuse_projections(model)
    assert [token for token, _ in generate_step(prompt, model, max_tokens=8)] == expected


@pytest.mark.parametrize(("make", "name"), [(tiny_model, "qwen2"), (quantised, "llama_tied")])
def test_an_engine_fuses_its_model_and_gives_the_same_tokens(
    make: Callable[[str], LoadedModel], name: str
) -> None:
    results: list[Runs] = []

    def run() -> None:
        loaded = make(name)
        # What is expected is computed before the engine comes.
        results.append(run_every_way(loaded, VOCAB_SIZE))
        assert len(joined_of(loaded.model)) == 2 * NUM_LAYERS

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results[0].equal == {"batch": True, "again": True, "alone": True, "forks": True}


class OtherLinear(nn.Linear):
    """Might do anything."""


class Block(nn.Module):
    """Attention's projections, called in whatever way a test wants."""

    def __init__(self, call: Callable[[Any, mx.array], mx.array] | None = None) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 64, bias=False)
        self.k_proj = nn.Linear(64, 32, bias=False)
        self.v_proj = nn.Linear(64, 32, bias=False)
        self.call = call or (lambda b, x: [b.q_proj(x), b.k_proj(x), b.v_proj(x)][0])

    def __call__(self, x: mx.array) -> mx.array:
        return self.call(self, x)


class Stack(nn.Module):
    """One block as a whole model."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = [block]

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        return self.layers[0](mx.ones((*ids.shape, 64)))


def refused() -> Block:
    def call(block: Any, x: mx.array) -> mx.array:
        raise ValueError("no")

    return Block(call)


def with_layers(**layers: nn.Module) -> Block:
    block = Block()
    for name, layer in layers.items():
        block[name] = layer
    return block


def lora() -> Block:
    from mlx_lm.tuner.lora import LoRALinear

    return with_layers(k_proj=LoRALinear.from_base(nn.Linear(64, 32, bias=False)))


def in_half() -> Block:
    block = Block()
    block.k_proj.set_dtype(mx.float16)
    return block


def all_quantised(**settings: Any) -> Block:
    """With one layer in another way."""
    block = Block()
    nn.quantize(block, group_size=32, bits=4)
    layer = nn.Linear(64, 32, bias=False)
    block["v_proj"] = layer.to_quantized(**{"group_size": 32, "bits": 4, **settings})
    return block


UNTOUCHED: dict[str, Callable[[], Block]] = {
    "a subclass": lambda: with_layers(v_proj=OtherLinear(64, 32, bias=False)),
    "LoRA": lora,
    "a bias in one": lambda: with_layers(q_proj=nn.Linear(64, 64)),
    "another type": in_half,
    "another input size": lambda: with_layers(k_proj=nn.Linear(32, 32, bias=False)),
    "one quantised": lambda: with_layers(
        k_proj=nn.Linear(64, 32, bias=False).to_quantized(group_size=32)
    ),
    "other bits": lambda: all_quantised(bits=8),
    "another group": lambda: all_quantised(group_size=64),
    "another mode": lambda: all_quantised(mode="mxfp4"),
    "other inputs": lambda: Block(lambda b, x: b.q_proj(x) + b.k_proj(x + 1).sum() + b.v_proj(x)),
    "one not called": lambda: Block(lambda b, x: [b.q_proj(x), b.k_proj(x)][0]),
    "a model that can't run": refused,
}


@pytest.mark.parametrize("what", UNTOUCHED)
def test_what_does_not_match_stays_as_it_is(what: str) -> None:
    block = UNTOUCHED[what]()
    before = dict(block)
    assert fuse_projections(Stack(block)) == 0
    assert dict(block).keys() == before.keys()
    assert all(block[name] is before[name] for name in before)


def test_blocks_of_the_matching_kind_are_joined() -> None:
    for block in (Block(), all_quantised()):
        assert fuse_projections(Stack(block)) == 2
        assert [type(module) for module in (block.q_proj, block.v_proj)] == [LinearPart] * 2


def test_a_layer_that_others_use_too_keeps_its_weights() -> None:
    model: Any = build_model(CONFIGS["llama"])
    model.spare = model.layers[0].mlp.gate_proj
    before = np.array(model.spare.weight)
    fuse_projections(model)
    np.testing.assert_array_equal(np.array(model.spare.weight), before)


def test_a_prompt_takes_little_more_memory_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that wait to be written at the step's end keep no product of several layers."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 16}
    deep = {**CONFIGS["llama"], **heads, "num_hidden_layers": 24}
    monkeypatch.setitem(tiny_models.CONFIGS, "llama", deep)
    peaks = []
    for fuse in (False, True):
        loaded = tiny_model("llama")
        if fuse:
            assert fuse_projections(loaded.model) == 3 * 24
        with ModelAdapter(loaded, make_backend("gather"), block_size=8) as adapter:
            mx.synchronize()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            run_chunk(adapter, 512, make_pool(adapter, 512))
            peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < 1.2 * peaks[0]
