from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.errors import ModelLoadError, UnsupportedModelError
from pagedmlx.kv.store import KVStore
from pagedmlx.models import probe
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.probe import probe_model
from pagedmlx.ops import make_backend
from pagedmlx.ops.base import AttentionBackend, AttentionParams, PagedBatch
from tests.support.tiny_models import CONFIGS, WINDOW, tiny_model


class FaultyBackend:
    """The gather backend with one fault."""

    name = "faulty"
    takes_padding = False

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.inner: AttentionBackend = make_backend("gather")

    def rest(self) -> None:
        """Nothing is kept."""

    def attend(
        self,
        queries: mx.array,
        layer: int,
        group: int,
        store: KVStore,
        batch: PagedBatch,
        params: AttentionParams,
    ) -> mx.array:
        if self.fault == "raise" and len(queries) > 2:
            raise ValueError("shapes\ndon't fit")
        if self.fault == "window":
            params = replace(params, window=None)
        if self.fault == "sinks":
            params = replace(params, sinks=None)
        output = self.inner.attend(queries, layer, group, store, batch, params)
        if self.fault == "nan":
            return output * float("nan")
        return output * 1.05 if self.fault == "scale" else output


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("backend", ["reference", "gather"])
def test_a_sound_model_passes_on_every_backend(name: str, backend: str) -> None:
    with ModelAdapter(tiny_model(name), make_backend(backend), block_size=4) as adapter:
        result = probe_model(adapter)
    assert result.error < 1e-4
    assert result.num_prompt_tokens > 8
    assert result.passed_windows


@pytest.mark.parametrize("fault", ["window", "sinks", "nan", "scale"])
def test_a_fault_of_the_attention_is_refused_with_its_size(fault: str) -> None:
    with (
        ModelAdapter(tiny_model("gpt_oss"), FaultyBackend(fault), block_size=4) as adapter,
        pytest.raises(UnsupportedModelError, match=r"gpt_oss: logits .* differ"),
    ):
        probe_model(adapter)


def test_a_model_whose_own_logits_are_not_numbers_is_told_from_a_fault_of_ours() -> None:
    loaded = tiny_model()
    model: Any = loaded.model
    model.model.norm.weight = model.model.norm.weight * float("nan")
    with (
        ModelAdapter(loaded, make_backend("auto"), block_size=4) as adapter,
        pytest.raises(ModelLoadError, match="llama: the model's own logits are not finite"),
    ):
        probe_model(adapter)


def test_a_model_that_fails_with_many_rows_is_refused_in_one_line() -> None:
    with (
        ModelAdapter(tiny_model(), FaultyBackend("raise"), block_size=4) as adapter,
        pytest.raises(UnsupportedModelError, match=r"llama: the model failed .*: shapes$"),
    ):
        probe_model(adapter)


def test_a_missing_block_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVStore, "copy_blocks", lambda *_: None)
    with (
        ModelAdapter(tiny_model(), make_backend("auto"), block_size=4) as adapter,
        pytest.raises(UnsupportedModelError, match="differ"),
    ):
        probe_model(adapter)


def test_a_very_long_window_is_not_passed_and_the_result_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "MAX_PROMPT_TOKENS", WINDOW - 2)
    with ModelAdapter(tiny_model("llama_window"), make_backend("auto"), block_size=4) as adapter:
        result = probe_model(adapter)
    assert not result.passed_windows
    assert result.num_prompt_tokens <= WINDOW


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_models_pass_within_their_tolerance(dtype: str) -> None:
    loaded = replace(tiny_model(), dtype=dtype)
    model: Any = loaded.model
    model.set_dtype(getattr(mx, dtype))
    with ModelAdapter(loaded, make_backend("auto"), block_size=8) as adapter:
        assert adapter.layout.dtype == dtype
        result = probe_model(adapter)
    assert result.error < result.tolerance


def test_the_probe_leaves_no_state_in_the_adapter() -> None:
    with ModelAdapter(tiny_model(), make_backend("auto"), block_size=4) as adapter:
        assert probe_model(adapter) == probe_model(adapter)
        assert np.isfinite(probe_model(adapter).error)
