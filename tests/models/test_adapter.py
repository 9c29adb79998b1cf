from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.cache import (
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from pagedmlx.core.batch import BatchArrays
from pagedmlx.core.groups import KVGroupKind
from pagedmlx.errors import UnsupportedModelError
from pagedmlx.kv.layout import LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import PoolWriter
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.compiled import MIN_USES
from pagedmlx.models.hand_over import HAND_OVER_LAYERS, LARGE_ROWS, HandOver
from pagedmlx.models.layer_cache import LayerCache
from pagedmlx.models.parts import RowLayout
from pagedmlx.ops import make_backend
from pagedmlx.ops.base import PagedBatch
from pagedmlx.ops.gather import GatherBackend
from tests.support.batches import make_batch
from tests.support.paged_run import PagedRun
from tests.support.tiny_models import (
    CONFIGS,
    GATHERED,
    HYBRID,
    VOCAB_SIZE,
    WINDOW,
    build_model,
    tiny_model,
)
from tests.support.token_writer import RotatingTokenWriter, TokenWriter

NAMES = (*sorted(CONFIGS), *GATHERED, *HYBRID)


def expected_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """mlx-lm's own logits for every position, in one pass over its own caches."""
    return np.array(model(mx.array(tokens)[None], cache=make_prompt_cache(model))[0])


def assert_same(logits: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert (logits.argmax(-1) == expected.argmax(-1)).all()


@pytest.fixture(params=NAMES)
def adapter(request: pytest.FixtureRequest) -> Iterator[ModelAdapter]:
    with ModelAdapter(tiny_model(request.param), make_backend("auto"), block_size=4) as adapter:
        yield adapter


def test_mixed_steps_over_scattered_blocks_give_mlx_lm_logits(adapter: ModelAdapter) -> None:
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, VOCAB_SIZE, length) for length in (23, 40, 31)]
    expected = [expected_logits(adapter.loaded.model, text) for text in texts]
    run = PagedRun(adapter, 3, 44)

    # A and B prefill together, C's chunks run beside the others' decodes and beside B's chunks.
    logits = run.step([(0, texts[0][:20]), (1, texts[1][:17])])
    assert_same(logits, np.stack([expected[0][19], expected[1][16]]))
    logits = run.step([(0, texts[0][20:21]), (1, texts[1][17:35]), (2, texts[2][:7])], [0, 2])
    assert_same(logits, np.stack([expected[0][20], expected[2][6]]))
    logits = run.step([(1, texts[1][35:36]), (0, texts[0][21:22]), (2, texts[2][7:29])])
    assert_same(logits, np.stack([expected[1][35], expected[0][21], expected[2][28]]))
    logits = run.step([(0, texts[0][22:23]), (1, texts[1][36:37]), (2, texts[2][29:30])])
    assert_same(logits, np.stack([expected[0][22], expected[1][36], expected[2][29]]))


def test_a_row_computes_the_same_alone_and_beside_others(adapter: ModelAdapter) -> None:
    rng = np.random.default_rng(2)
    texts = [rng.integers(3, VOCAB_SIZE, 18) for _ in range(3)]
    run = PagedRun(adapter, 6, 20)
    together = run.step([(index, text) for index, text in enumerate(texts)])
    alone = [run.step([(index + 3, text)])[0] for index, text in enumerate(texts)]
    assert_same(together, np.stack(alone))


@pytest.mark.parametrize("backend", ["reference", "gather"])
def test_both_backends_serve_sliding_windows_and_sinks(backend: str) -> None:
    text = np.random.default_rng(3).integers(3, VOCAB_SIZE, 3 * WINDOW)
    with ModelAdapter(tiny_model("gpt_oss"), make_backend(backend), block_size=4) as adapter:
        expected = expected_logits(adapter.loaded.model, text)
        run = PagedRun(adapter, 1, 40)
        assert_same(run.step([(0, text[: WINDOW + 5])])[0], expected[WINDOW + 4])
        for position in range(WINDOW + 5, len(text)):
            assert_same(run.step([(0, text[position : position + 1])])[0], expected[position])


def test_groups_and_shapes_come_from_the_model_itself() -> None:
    with ModelAdapter(tiny_model("llama_window"), make_backend("auto"), block_size=8) as adapter:
        window, full = adapter.layout.groups
        assert (window.kind, window.layers, window.window) == (KVGroupKind.WINDOW, (0, 2), WINDOW)
        assert (full.kind, full.layers, full.window) == (KVGroupKind.FULL, (1, 3), None)
        assert adapter.layout.layers == (LayerShape(2, 8, 8),) * 4
        assert adapter.layout.dtype == "float32"
        assert adapter.layout.block_size == 8
        assert adapter.vocab_size == VOCAB_SIZE
        assert adapter.row_layout is RowLayout.TOKEN_ROWS


def test_the_pool_takes_the_dtype_that_is_asked_for() -> None:
    with ModelAdapter(
        tiny_model(), make_backend("auto"), block_size=4, kv_cache_dtype="float16"
    ) as adapter:
        text = np.random.default_rng(4).integers(3, VOCAB_SIZE, 20)
        expected = expected_logits(adapter.loaded.model, text)[-1]
        run = PagedRun(adapter, 1, 20)
        assert adapter.layout.dtype == "float16"
        logits = run.step([(0, text)])[0]
        np.testing.assert_allclose(logits, expected, atol=2e-2 * np.abs(expected).max())


def test_a_step_without_sampling_rows_still_writes_the_blocks() -> None:
    text = np.random.default_rng(5).integers(3, VOCAB_SIZE, 12)
    with ModelAdapter(tiny_model(), make_backend("auto"), block_size=4) as adapter:
        run = PagedRun(adapter, 1, 12)
        assert run.step([(0, text[:10])], sampling=[]).shape == (0, VOCAB_SIZE)
        expected = expected_logits(adapter.loaded.model, text)[-1]
        assert_same(run.step([(0, text[10:])])[0], expected)


def test_a_long_prompt_never_makes_logits_for_every_position() -> None:
    vocab_size, length = 32_000, 1_600
    model: Any = build_model({**CONFIGS["llama"], "vocab_size": vocab_size, "num_hidden_layers": 1})
    loaded = replace(tiny_model(), model=model)
    all_logits_bytes = vocab_size * length * 4
    tokens = np.arange(length) % vocab_size

    def peak_of(work: Any) -> int:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        work()
        return mx.get_peak_memory() - before

    with ModelAdapter(loaded, make_backend("auto"), block_size=16) as adapter:
        run = PagedRun(adapter, 1, length)
        assert peak_of(lambda: run.step([(0, tokens)])) < all_logits_bytes / 2
    # The same measure sees them when they are made.
    assert peak_of(lambda: mx.eval(model(mx.array(tokens)[None]))) >= all_logits_bytes


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma2", "qwen3_5"])
def test_no_step_copies_the_pool(name: str) -> None:
    num_blocks = 20_000
    with ModelAdapter(tiny_model(name), make_backend("auto"), block_size=16) as adapter:
        run = PagedRun(adapter, 3, 64)
        layout = adapter.layout
        run.store = KVStore(layout, (num_blocks,) * len(layout.groups))
        pool_array_bytes = num_blocks * 16 * layout.layer_bytes(layout.groups[0].layers[0]) // 2
        run.step([(0, range(5, 15))])
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        for token in range(20):
            run.step([(0, [token]), (1, [token, token + 1]), (2, [token, token + 1])])
        assert mx.get_peak_memory() - before < pool_array_bytes / 4


def test_layouts_are_found_from_the_models_themselves() -> None:
    def look(name: str) -> tuple[RowLayout, bool, bool]:
        with ModelAdapter(tiny_model(name), make_backend("auto")) as adapter:
            return adapter.row_layout, adapter.reads_gathers, adapter.layout.state_bytes > 0

    assert look("gpt_oss") == (RowLayout.TOKEN_ROWS, False, False)
    assert look("deepseek_v3") == (RowLayout.SEQUENCE_ROWS, True, False)
    assert look("gemma2") == (RowLayout.SEQUENCE_ROWS, True, False)
    assert look("qwen3_5") == (RowLayout.SEQUENCE_ROWS, False, True)
    assert look("kimi_linear") == (RowLayout.SEQUENCE_ROWS, True, True)
    assert look("llama4") == (RowLayout.SINGLE_ROWS, True, False)


def test_a_model_without_k_and_v_has_blocks_that_take_no_memory() -> None:
    with ModelAdapter(tiny_model("mamba2"), make_backend("auto")) as adapter:
        (group,) = adapter.layout.groups
        assert group.layers == ()
        assert adapter.layout.block_bytes(0) == 0
        run = PagedRun(adapter, 2, 20)
        run.step([(0, range(5, 15)), (1, range(3, 9))])
        states = run.store.states.take(run.sequences, run.lengths)
        assert states is not None
        arrays = [array for layer in states.layers for array in layer if array is not None]
        assert sum(array.nbytes for array in arrays) == 2 * adapter.layout.state_bytes


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (ConcatenateKVCache(), "ConcatenateKVCache"),
        (RotatingKVCache(max_size=8, keep=4), "first 4 tokens"),
    ],
)
def test_kinds_of_cache_that_cannot_be_paged_are_named(cache: Any, words: str) -> None:
    loaded = tiny_model()
    loaded.model.make_cache = lambda: [cache, *(KVCache() for _ in range(3))]
    with pytest.raises(UnsupportedModelError, match=f"llama: layer 0 keeps .*{words}"):
        ModelAdapter(loaded, make_backend("auto"))


@pytest.mark.parametrize("kept", [WINDOW - 1, WINDOW + 1])
def test_a_window_that_the_caches_do_not_know_leaves_masking_to_the_model(kept: int) -> None:
    loaded = tiny_model("llama_window")
    loaded.model.make_cache = lambda: [RotatingKVCache(max_size=kept) for _ in range(4)]
    if kept < WINDOW:
        with pytest.raises(UnsupportedModelError, match=f"window of {WINDOW}"):
            ModelAdapter(loaded, make_backend("auto"))
    else:
        with ModelAdapter(loaded, make_backend("auto")) as adapter:
            assert adapter.reads_gathers


def test_a_model_without_a_body_of_its_own_is_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tiny_model().model.layers

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return inputs

    loaded = replace(tiny_model(), model=Flat())
    with pytest.raises(UnsupportedModelError, match="body from its head"):
        ModelAdapter(loaded, make_backend("auto"))
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention


def test_a_refusal_or_a_close_leaves_mlx_lm_as_it_was() -> None:
    original = base.scaled_dot_product_attention
    loaded = tiny_model()
    body_class = type(loaded.model.model)
    adapter = ModelAdapter(loaded, make_backend("auto"), block_size=4)
    assert llama.scaled_dot_product_attention is not original
    PagedRun(adapter, 1, 8).step([(0, [5, 6, 7])])
    assert type(loaded.model.model) is body_class
    adapter.close()
    adapter.close()
    assert llama.scaled_dot_product_attention is original


NUM_BLOCKS = 80


def rows_of(num_rows: int) -> BatchArrays:
    """A prompt of so many tokens."""
    rng = np.random.default_rng(0)
    return make_batch([(0, num_rows)], block_size=4, num_blocks=NUM_BLOCKS, rng=rng)


def test_a_gpu_begins_with_the_first_layers_while_the_graph_of_others_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {**CONFIGS["llama"], "num_hidden_layers": 2 * HAND_OVER_LAYERS + 1}
    loaded = replace(tiny_model(), model=build_model(config))
    handed: list[tuple[int, ...]] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: handed.extend(a.shape for a in arrays))
    many = LARGE_ROWS + 1
    for writer, num_rows, num_times, is_traced in (
        (None, 5, 0, False),
        (TokenWriter(), 5, 3, False),
        (TokenWriter(), 5, 0, True),
        (TokenWriter(), LARGE_ROWS, 3, False),
        (TokenWriter(), many, config["num_hidden_layers"], False),
        (TokenWriter(), many, 0, True),
        (None, many, 0, False),
    ):
        handed.clear()
        with ModelAdapter(loaded, make_backend("auto"), block_size=4) as adapter:
            host = rows_of(num_rows)
            store = KVStore(adapter.layout, (NUM_BLOCKS,), writer=writer)
            adapter.forward(PagedBatch(host, is_traced=is_traced), store)
        assert [shape[0] for shape in handed] == [num_rows] * num_times


@pytest.mark.parametrize(
    ("name", "num_handed"),
    [
        ("jamba", 1),  # of four layers the second and the last have attention
        ("mistral3", 0),  # is given K and V to read, in some layers
    ],
)
def test_of_layers_without_attention_none_is_counted(
    name: str, num_handed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[mx.array] = []
    with ModelAdapter(tiny_model(name), make_backend("auto"), block_size=4) as adapter:
        run = PagedRun(adapter, 1, NUM_BLOCKS)
        run.store = KVStore(adapter.layout, run.num_blocks, writer=TokenWriter())
        for first in (0, 5):
            handed.clear()
            with monkeypatch.context() as patch:
                patch.setattr(mx, "async_eval", lambda *arrays: handed.append(arrays[0]))
                run.step([(0, range(first, first + 5))])
            assert sum(array.ndim == 3 for array in handed) == num_handed


def test_what_was_handed_over_is_waited_for_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {**CONFIGS["llama"], "num_hidden_layers": 2 * HAND_OVER_LAYERS + 1}
    loaded = replace(tiny_model(), model=build_model(config))
    order: list[str] = []
    monkeypatch.setattr(mx, "async_eval", lambda *_: order.append("given"))
    monkeypatch.setattr(mx, "synchronize", lambda *_: order.append("waited"))
    answers = iter((False, True, False))

    def is_short() -> bool:
        order.append("asked")
        return next(answers)

    assert not HandOver().memory_is_short()
    with ModelAdapter(loaded, make_backend("auto"), block_size=4) as adapter:
        adapter.hand_over.memory_is_short = is_short
        store = KVStore(adapter.layout, (NUM_BLOCKS,), writer=TokenWriter())
        order.clear()
        adapter.forward(PagedBatch(rows_of(5)), store)
    assert order == [*2 * ["given", "asked"], "waited", "given", "asked"]


@pytest.mark.parametrize("writer", [TokenWriter(), RotatingTokenWriter()])
def test_what_layers_have_stored_is_kept_by_none_of_them(
    writer: PoolWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**CONFIGS["llama"], "num_hidden_layers": 2 * HAND_OVER_LAYERS + 1}
    loaded = replace(tiny_model(), model=build_model(config))
    stored: list[weakref.ref[mx.array]] = []
    num_kept: list[int] = []
    update = LayerCache.update_and_fetch

    def update_and_fetch(self: LayerCache, keys: mx.array, values: mx.array) -> Any:
        stored.extend((weakref.ref(keys), weakref.ref(values)))
        return update(self, keys, values)

    def async_eval(*_: mx.array) -> None:
        num_kept.append(sum(ref() is not None for ref in stored))

    with ModelAdapter(loaded, make_backend("auto"), block_size=4) as adapter:
        store = KVStore(adapter.layout, (8,), writer=writer)
        host = make_batch([(0, 5)], block_size=4, num_blocks=8, rng=np.random.default_rng(0))
        monkeypatch.setattr(LayerCache, "update_and_fetch", update_and_fetch)
        monkeypatch.setattr(mx, "async_eval", async_eval)
        adapter.forward(PagedBatch(host), store)
    assert len(num_kept) == 3
    assert max(num_kept) <= 2, "more than one layer's"


class Ahead(GatherBackend):
    """Plans nothing ahead of a step, but says so."""

    arrays = (np.zeros(8, np.int32),)
    shape = ()

    def can_plan_ahead(self, host: BatchArrays) -> bool:
        return True

    def plan_ahead(self, batch: PagedBatch) -> Ahead:
        return self

    def follow(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("name", "num_graphs"), [("llama", 1), ("dbrx", 0)])
def test_models_whose_code_looks_at_values_are_not_compiled(name: str, num_graphs: int) -> None:
    loaded = tiny_model(name)
    caches = make_prompt_cache(loaded.model)
    expected = loaded.model(mx.array([[0]]), cache=caches)[0]
    with ModelAdapter(loaded, Ahead(), block_size=4) as adapter:
        store = KVStore(adapter.layout, (8,), writer=TokenWriter())
        host = make_batch([(0, 1)], block_size=4, num_blocks=8, rng=np.random.default_rng(0))
        host = replace(host, token_ids=np.zeros(1, np.int32))
        for _ in range(MIN_USES + 1):
            logits = adapter.forward(PagedBatch(host), store)
            store.submit(logits)
            np.testing.assert_allclose(np.array(logits), np.array(expected), rtol=1e-4, atol=1e-5)
        found = adapter._compiled
        assert num_graphs == (0 if found is None else len(found[1]._graphs))


def test_compiled_steps_with_prompts_are_waited_for_too() -> None:
    asked: list[bool] = []
    with ModelAdapter(tiny_model(), Ahead(), block_size=4) as adapter:
        adapter.hand_over.memory_is_short = lambda: asked.append(True) is not None
        store = KVStore(adapter.layout, (NUM_BLOCKS,), writer=TokenWriter())
        for _ in range(MIN_USES):
            asked.clear()
            adapter.forward(PagedBatch(rows_of(8)), store)
        assert adapter._compiled is not None
        assert len(adapter._compiled[1]._graphs) == 1
    # Its four layers are two spans, the second of which goes on as logits.
    assert len(asked) == 1
