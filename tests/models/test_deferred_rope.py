"""Queries and keys are rotated where K and V are written, if nothing else sees them, and else not.

A writer that rotates by MLX's own operations stands in for the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import rope_utils
from mlx_lm.models.base import scaled_dot_product_attention

from pagedmlx.errors import UnsupportedModelError
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import Rope
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.deferred_rope import DeferredRopes, _known_places, read_rope
from pagedmlx.models.fused import fuse_projections
from pagedmlx.models.loader import LoadedModel
from pagedmlx.models.probe import ProbeResult, probe_model
from pagedmlx.ops import make_backend
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Launch
from tests.metal.launcher import FiberLauncher, as_numpy
from tests.support import tiny_models
from tests.support.paged_run import PagedRun
from tests.support.tiny_models import CONFIGS, GATHERED, HYBRID, tiny_model
from tests.support.token_writer import RotatingTokenWriter

NUM_LAYERS = 4
# What isn't named here defers all ropes.
DEFERRED = {
    "cohere2": 0,  # it converts rotated queries, or rotates nothing
    **dict.fromkeys((*GATHERED, *HYBRID), 0),  # not in token rows
}


def probe(loaded: LoadedModel) -> tuple[int, ProbeResult]:
    """How many writes rotated, and how far the logits are from mlx-lm's."""
    writer = RotatingTokenWriter()
    with ModelAdapter(loaded, make_backend("gather"), block_size=4) as adapter:
        result = probe_model(adapter, writer)
        num_deferred = len(adapter._ropes or ())
    assert (writer.num_rotated > 0) == (num_deferred > 0)
    return num_deferred, result


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", [*sorted(CONFIGS), *GATHERED, *HYBRID])
def test_a_model_gives_the_same_logits_whether_its_ropes_are_deferred_or_not(
    name: str, is_fused: bool
) -> None:
    loaded = tiny_model(name)
    if is_fused:
        fuse_projections(loaded.model)
    num_deferred, result = probe(loaded)
    assert num_deferred == DEFERRED.get(name, NUM_LAYERS)
    assert result.error < 1e-4


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
@pytest.mark.parametrize("traditional", [False, True])
def test_every_rope_that_is_one_operation_is_deferred(
    scaling: dict[str, Any], traditional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**CONFIGS["llama"], "rope_scaling": scaling, "rope_traditional": traditional}
    monkeypatch.setattr(tiny_models, "CONFIGS", {"llama": config})
    num_deferred, result = probe(tiny_model())
    assert num_deferred == NUM_LAYERS
    assert result.error < 1e-4


def test_layers_that_rotate_alike_have_one_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0}
    config = {**CONFIGS["llama"], "rope_scaling": scaling}
    monkeypatch.setattr(tiny_models, "CONFIGS", {"llama": config})
    model: Any = tiny_model().model
    model.layers[1].self_attn.rope._freqs *= 2
    model.layers[2].self_attn.rope = nn.RoPE(8)
    first, *others, last = [place.rope for place in _known_places(model)]
    assert first is last
    assert all(rope is not first for rope in others)
    assert others[0] is not others[1]


class OtherRoPE(nn.RoPE):
    """Might do anything."""


@pytest.mark.parametrize(
    "module",
    [
        OtherRoPE(8),
        nn.RoPE(7),
        rope_utils.YarnRoPE(8, scaling_factor=4.0),
        rope_utils.SuScaledRoPE(8),
        rope_utils.DynamicNTKScalingRoPE(8, 2048, False, 10000.0, 2.0),
        nn.Linear(8, 8),
        "no module",
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_that_do_more_than_rotate_are_not_known(module: Any) -> None:
    assert read_rope(module) is None


Rows = tuple[Any, Any, Any, Any]
"""Queries, keys, values, and what the attention's output is multiplied with."""


class Attention(nn.Module):
    """Llama's attention, in which something else may be done with what was rotated."""

    def __init__(self, like: Any, change: Callable[..., Rows]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = like.q_proj, like.k_proj, like.v_proj
        self.o_proj, self.rope = like.o_proj, like.rope
        self.change = change

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, length, _ = x.shape
        queries, keys, values = (
            projection(x).reshape(batch, length, -1, 8).transpose(0, 2, 1, 3)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys, values, gate = self.change(self.rope, queries, keys, values, cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
        output = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=8**-0.5, mask=mask
        )
        return self.o_proj((gate * output).transpose(0, 2, 1, 3).reshape(batch, length, -1))


def as_it_is(rope: Any, q: mx.array, k: mx.array, v: mx.array, at: Any) -> Rows:
    return rope(q, offset=at), rope(k, offset=at), v, 1.0


def by_position(rope: Any, q: mx.array, k: mx.array, v: mx.array, at: Any) -> Rows:
    return rope(q, at), rope(k, at), v, 1.0


def from_behind(rope: Any, q: mx.array, k: mx.array, v: mx.array, at: Any) -> Rows:
    k = rope(k, offset=at)
    return rope(q, offset=at), k, v, 1.0


def scaled_keys(rope: Any, q: mx.array, k: mx.array, v: mx.array, at: Any) -> Rows:
    return rope(q, offset=at), 0.5 * rope(k, offset=at), v, 1.0


def queries_alone(rope: Any, q: mx.array, k: mx.array, v: mx.array, at: Any) -> Rows:
    return rope(q, offset=at), k, v, 1.0


def rotated_values(rope: Any, q: mx.array, k: mx.array, v: mx.array, at: Any) -> Rows:
    return rope(q, offset=at), rope(k, offset=at), rope(v, offset=at), 1.0


def gated(rope: Any, q: mx.array, k: mx.array, v: mx.array, at: Any) -> Rows:
    q = rope(q, offset=at)
    return q, rope(k, offset=at), v, mx.sigmoid(q)


def twice(rope: Any, q: mx.array, k: mx.array, v: mx.array, at: Any) -> Rows:
    return rope(rope(q, offset=at), offset=at), rope(rope(k, offset=at), offset=at), v, 1.0


def one_for_both(rope: Any, q: mx.array, k: mx.array, v: mx.array, at: Any) -> Rows:
    q = rope(q, offset=at)
    return q, q, mx.repeat(v, 2, axis=1), 1.0


def from_one(rope: Any, q: mx.array, k: mx.array, v: mx.array, at: Any) -> Rows:
    return rope(q, offset=at), rope(q, offset=at), mx.repeat(v, 2, axis=1), 1.0


def one_on(rope: Any, q: mx.array, k: mx.array, v: mx.array, at: Any) -> Rows:
    return rope(q, offset=at + 1), rope(k, offset=at + 1), v, 1.0


def odd_model(change: Callable[..., Rows]) -> LoadedModel:
    """A tiny Llama with two layers of another kind."""
    loaded = tiny_model("llama_tied")
    model: Any = loaded.model
    for layer in model.layers[1:3]:
        layer.self_attn = Attention(layer.self_attn, change)
    return loaded


@pytest.mark.parametrize("change", [as_it_is, by_position, from_behind])
def test_what_goes_straight_to_the_cache_is_deferred(change: Callable[..., Rows]) -> None:
    num_deferred, result = probe(odd_model(change))
    assert num_deferred == NUM_LAYERS
    assert result.error < 1e-4


@pytest.mark.parametrize(
    "change", [scaled_keys, queries_alone, rotated_values, twice, one_for_both, from_one]
)
def test_layers_that_do_anything_else_rotate_by_themselves(change: Callable[..., Rows]) -> None:
    num_deferred, result = probe(odd_model(change))
    assert num_deferred == NUM_LAYERS - 2
    assert result.error < 1e-4


def test_nothing_is_deferred_in_a_model_that_looks_at_what_was_rotated() -> None:
    num_deferred, result = probe(odd_model(gated))
    assert num_deferred == 0
    assert result.error < 1e-4


def test_rows_that_are_at_another_position_are_rotated_at_once() -> None:
    writer = RotatingTokenWriter()
    with ModelAdapter(odd_model(one_on), make_backend("gather"), block_size=4) as adapter:
        assert probe_model(adapter, writer).error < 1e-4
        assert len(adapter._ropes or ()) == NUM_LAYERS
        before = writer.num_rotated
        store = KVStore(adapter.layout, (8,), writer=writer)
        run = PagedRun(adapter, 1, 8)
        run.store = store
        run.step([(0, [5, 6, 7])])
    assert writer.num_rotated == before + NUM_LAYERS - 2


def test_stand_ins_are_there_during_a_paged_call_alone() -> None:
    loaded = tiny_model()
    model: Any = loaded.model
    originals = [layer.self_attn.rope for layer in model.layers]
    seen: list[bool] = []

    def are_original() -> bool:
        ropes = [layer.self_attn.rope for layer in model.layers]
        return all(each is original for each, original in zip(ropes, originals, strict=True))

    norm = model.model.norm

    class Norm(nn.Module):
        def __call__(self, x: mx.array) -> mx.array:
            seen.append(are_original())
            if len(seen) == limit:
                raise ValueError("no")
            return norm(x)

    limit = 0
    with ModelAdapter(loaded, make_backend("gather"), block_size=4) as adapter:
        model.model.norm = Norm()
        run = PagedRun(adapter, 1, 8)
        run.store = KVStore(adapter.layout, (8,), writer=RotatingTokenWriter())
        run.step([(0, [5, 6, 7])])
        assert seen.pop() is False
        assert are_original()
        seen.clear()
        # What the probe compares with.
        adapter.last_logits(mx.array([5, 6, 7]), model_caches(model))
        assert seen == [True]
        limit = 2
        with pytest.raises(ValueError, match="no"):
            run.step([(0, [8])])
        assert are_original()
        limit = 0
        run.step([(0, [8])])


def model_caches(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


@pytest.mark.parametrize("change", [scaled_keys, queries_alone, rotated_values, twice])
def test_a_wrong_deferral_is_refused(
    change: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedmlx.models.deferred_rope._goes_to_caches", lambda *_: True)
    with (
        ModelAdapter(odd_model(change), make_backend("gather"), block_size=4) as adapter,
        pytest.raises(UnsupportedModelError),
    ):
        probe_model(adapter, RotatingTokenWriter())


def test_a_wrong_rotation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pagedmlx.models.deferred_rope.read_rope",
        lambda module: Rope(8, False, 10000.0, 1.0) if type(module) is nn.RoPE else None,
    )
    with (
        ModelAdapter(tiny_model("llama"), make_backend("gather"), block_size=4) as adapter,
        pytest.raises(UnsupportedModelError, match="differ"),
    ):
        probe_model(adapter, RotatingTokenWriter())


def test_an_array_is_taken_once_and_only_by_identity() -> None:
    ropes, offset, x = DeferredRopes(), mx.array([1]), mx.ones((1, 1, 1, 8))
    rope = Rope(8, False, 10000.0, 1.0)
    assert not ropes.give(x, offset, rope)
    with ropes.using(offset):
        assert not ropes.give(x, mx.array([1]), rope)
        assert ropes.give(x, offset, rope)
        assert ropes.take(x + 0) is None
        assert ropes.take(x) is rope
        assert ropes.take(x) is None
    with pytest.raises(UnsupportedModelError, match="did not get there"), ropes.using(offset):
        ropes.give(x, offset, rope)
    assert ropes.take(x) is None


class CountingLauncher(FiberLauncher):
    """Counts launches, the copies that MLX makes of inputs that don't lie in a row included."""

    num_launches = 0

    def __call__(self, launch: Launch) -> list[mx.array]:
        self.num_launches += 1
        if not launch.kernel.strided:
            arrays = map(as_numpy, launch.inputs)
            self.num_launches += sum(not array.flags.c_contiguous for array in arrays)
        return super().__call__(launch)


def num_launches(is_deferred: bool, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Launches of a decode step that have to do with K and V: rotation, write, attention."""
    launcher, rope = CountingLauncher(), mx.fast.rope

    def counted(x: mx.array, *args: Any, **settings: Any) -> mx.array:
        # MLX copies rows of several sequences that don't lie in a row, then rotates the copy.
        launcher.num_launches += 1 if as_numpy(x).flags.c_contiguous else 2
        return rope(x, *args, **settings)

    loaded = tiny_model("llama")
    fuse_projections(loaded.model)
    with ModelAdapter(loaded, KernelBackend(launcher, 1), block_size=4) as adapter:
        if not is_deferred:
            adapter._ropes = DeferredRopes()
        run = PagedRun(adapter, num_rows, 8)
        run.store = KVStore(adapter.layout, run.num_blocks, writer=InPlaceWriter(launcher))
        parts = [(row, [5 + row]) for row in range(num_rows)]
        run.step(parts)
        monkeypatch.setattr(mx.fast, "rope", counted)
        launcher.num_launches = 0
        run.step(parts)
    return launcher.num_launches


@pytest.mark.parametrize(("num_rows", "saved"), [(1, 1), (9, 4)])
def test_a_decode_step_has_fewer_launches(
    num_rows: int, saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = num_launches(False, num_rows, monkeypatch)
    after = num_launches(True, num_rows, monkeypatch)
    assert after == 2 * NUM_LAYERS
    assert before - after == saved * NUM_LAYERS
