"""What of sentence-transformers' layout is understood, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.core.pooling import EmbeddingSpec, NoEmbedding, Pooling
from pagedmlx.models.embedding import read_embedding
from pagedmlx.models.loader import load_model
from pagedmlx.models.rows import RowSelection
from tests.support.embedding_model import save_embedding_folder, write_json
from tests.support.tiny_models import build_model, save_tiny_folder, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_embedding_folder(tmp_path / "tiny")


def read(folder: Path, **config: Any) -> EmbeddingSpec | NoEmbedding:
    return read_embedding(folder, {"hidden_size": 32, **config})


@pytest.mark.parametrize(
    ("pooling", "found"),
    [
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 32}, Pooling.FIRST),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 32}, Pooling.LAST),
        ({"pooling_mode": ["mean"]}, Pooling.MEAN),
        ({"pooling_mode": "cls"}, Pooling.FIRST),
    ],
)
def test_poolings_are_read_in_both_forms(folder: Path, pooling: Any, found: Pooling):
    write_json(folder / "1_Pooling" / "config.json", pooling)
    assert read(folder) == EmbeddingSpec(found, 32, is_normalized=True)


@pytest.mark.parametrize(
    ("config", "is_matryoshka"),
    [({"is_matryoshka": True}, True), ({"matryoshka_dimensions": [8, 16]}, True), ({}, False)],
)
def test_the_config_says_whether_fewer_dimensions_will_do(
    folder: Path, config: Any, is_matryoshka: bool
):
    spec = read(folder, **config)
    assert isinstance(spec, EmbeddingSpec)
    assert spec.is_matryoshka is is_matryoshka


def test_the_length_of_the_layout_is_read(folder: Path):
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 99, "do_lower_case": False})
    spec = read(folder)
    assert isinstance(spec, EmbeddingSpec)
    assert spec.max_len == 99


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "weightedmean"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "cls_token and mean_tokens",
        ),
        ("1_Pooling/config.json", {}, "none"),
        ("1_Pooling/config.json", [], "not a JSON object"),
        (
            "1_Pooling/config.json",
            {"pooling_mode": "cls", "embedding_dimension": 31},
            "31 dimensions, config.json 32",
        ),
        ("modules.json", {}, "no list of modules"),
        ("modules.json", [3], "no list of modules"),
        ("modules.json", [], "nothing"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    folder: Path, file: str, content: Any, named: str
):
    write_json(folder / file, content)
    found = read(folder)
    assert isinstance(found, NoEmbedding)
    assert named in found.reason


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        (["Transformer", "Pooling", "Dense", "Normalize"], "Dense"),
        (["Transformer", "Normalize", "Pooling"], "it must be"),
        (["Transformer"], "it must be"),
        (["Transformer", "Pooling", "Pooling"], "Pooling"),
        (["custom_st.Transformer", "Pooling"], "custom_st.Transformer"),
        (["WordEmbeddings", "Pooling"], "WordEmbeddings"),
    ],
)
def test_other_modules_are_refused_by_name(tmp_path: Path, modules: list[str], named: str):
    found = read(save_embedding_folder(tmp_path / "m", modules=modules))
    assert isinstance(found, NoEmbedding)
    assert named in found.reason


def test_the_names_of_newer_versions_are_understood(tmp_path: Path):
    base = "sentence_transformers"
    modules = [
        f"{base}.base.modules.transformer.Transformer",
        f"{base}.sentence_transformer.modules.pooling.Pooling",
    ]
    folder = save_embedding_folder(tmp_path / "m", modules=modules)
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["path"] = "1_Pooling"
    write_json(folder / "modules.json", listed)
    assert read(folder) == EmbeddingSpec(Pooling.LAST, 32, is_normalized=False)


@pytest.mark.parametrize("path", ["../x", "/etc", "a/../../b"])
def test_no_file_outside_the_folder_is_read(folder: Path, path: str):
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["path"] = path
    write_json(folder / "modules.json", listed)
    found = read(folder)
    assert isinstance(found, NoEmbedding)
    assert repr(path) in found.reason


@pytest.mark.parametrize("config", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_attention_in_both_directions_is_refused(folder: Path, config: Any):
    for each in (config, {"text_config": config}):
        found = read(folder, **each)
        assert isinstance(found, NoEmbedding)
        assert "both directions" in found.reason


def test_damaged_and_missing_files_leave_a_model_that_writes(folder: Path):
    (folder / "modules.json").write_text("[" * 100_000)
    loaded = load_model(folder)
    assert isinstance(loaded.embedding, NoEmbedding)
    assert "can't be read" in loaded.embedding.reason
    write_json(folder / "modules.json", [])
    (folder / "modules.json").unlink()
    found = read(folder)
    assert isinstance(found, NoEmbedding)
    assert "no modules.json" in found.reason
    assert found.hint


@pytest.mark.parametrize(
    ("is_tied", "has_prefix", "has_head"),
    [(True, False, False), (False, False, False), (False, True, False), (False, False, True)],
)
def test_a_body_without_its_head_or_prefix_loads(
    tmp_path: Path, is_tied: bool, has_prefix: bool, has_head: bool
):
    folder = save_embedding_folder(
        tmp_path / "m", has_prefix=has_prefix, has_head=has_head, tie_word_embeddings=is_tied
    )
    loaded = load_model(folder)
    assert loaded.embedding == EmbeddingSpec(Pooling.LAST, 32, is_normalized=True)
    config = json.loads((folder / "config.json").read_text())
    whole: Any = build_model({**config, "tie_word_embeddings": False})
    tokens = mx.array([[5, 6, 7]])
    assert np.array_equal(loaded.model.model(tokens), whole.model(tokens))  # type: ignore[attr-defined]
    assert type(loaded.model) is type(whole)


def test_a_whole_model_in_that_layout_keeps_its_head(folder: Path, tmp_path: Path):
    plain = load_model(save_tiny_folder(tmp_path / "plain", "qwen3"))
    loaded = load_model(folder)
    tokens = mx.array([[5, 6, 7]])
    assert np.array_equal(loaded.model(tokens), plain.model(tokens))


def test_models_whose_last_norm_is_outside_of_the_body_are_known():
    assert RowSelection(tiny_model("qwen3").model).sees_last_states
    assert not RowSelection(tiny_model("plamo2").model).sees_last_states
