from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from pagedmlx import LLM
from pagedmlx.engine import memory
from pagedmlx.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.loader import load_model
from pagedmlx.models.probe import probe_model
from pagedmlx.ops import make_backend
from tests.support.tiny_models import CONFIGS, build_model, save_tiny_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_folder(tmp_path / "tiny model")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("loading a local model opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def logits_of(model: Any) -> np.ndarray:
    return np.array(model(mx.arange(20)[None])[0].astype(mx.float32))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_a_folder_loads_as_the_model_it_was_saved_from(tmp_path: Path, name: str) -> None:
    loaded = load_model(save_tiny_folder(tmp_path / name, name, seed=3))
    assert loaded.model_type == CONFIGS[name]["model_type"]
    np.testing.assert_allclose(
        logits_of(loaded.model), logits_of(build_model(CONFIGS[name], seed=3)), atol=1e-4
    )
    assert loaded.parameter_bytes == sum(
        array.nbytes for _, array in tree_flatten(loaded.model.parameters())
    )


def test_what_the_engine_must_know_comes_from_the_configs(folder: Path) -> None:
    loaded = load_model(folder)
    assert loaded.max_model_len == 4096
    assert loaded.eos_token_ids == {1, 2}
    assert loaded.gguf_metadata is None
    assert loaded.dtype == "float32"
    assert loaded.path == folder


def test_paths_of_every_form_find_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (folder, f"{folder}/", "tiny model", "link", "~/tiny model"):
        assert load_model(path).path == folder


def test_the_model_id_changes_with_the_files_and_the_type(folder: Path, tmp_path: Path) -> None:
    first = load_model(folder).model_id
    assert load_model(folder).model_id == first
    assert load_model(folder, dtype="float16").model_id != first
    assert load_model(save_tiny_folder(tmp_path / "b")).model_id != first
    save_tiny_folder(folder, seed=1)
    assert load_model(folder).model_id != first


def test_progress_is_reported_and_ends_at_the_whole(folder: Path) -> None:
    seen: list[tuple[str, float | None]] = []
    load_model(folder, on_progress=lambda what, share: seen.append((what, share)))
    assert seen[0] == ("reading tiny model", None)
    assert seen[-1] == ("loading tiny model", 1.0)


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_quantised_folders_are_expanded_to_float32_on_the_cpu(
    tmp_path: Path, name: str, mode: str
) -> None:
    config = {**CONFIGS[name], "hidden_size": 64, "moe_intermediate_size": 64}
    config |= {"intermediate_size": 64, "num_attention_heads": 8}
    model = build_model(config)
    nn.quantize(model, group_size=32, bits=4, mode=mode)
    folder = tmp_path / "quantised"
    folder.mkdir()
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    quantization = {"group_size": 32, "bits": 4, "mode": mode}
    (folder / "config.json").write_text(json.dumps({**config, "quantization": quantization}))

    expanded, packed = load_model(folder), load_model(folder, dtype="bfloat16")
    assert {str(array.dtype) for _, array in tree_flatten(expanded.model.parameters())} == {
        "mlx.core.float32"
    }
    np.testing.assert_allclose(logits_of(expanded.model), logits_of(model), atol=1e-2)
    assert packed.dtype == "bfloat16"
    assert packed.parameter_bytes < expanded.parameter_bytes / 3
    with ModelAdapter(expanded, make_backend("auto"), block_size=4) as adapter:
        assert probe_model(adapter).error < 1e-4


def test_a_bfloat16_folder_becomes_float32_on_the_cpu_unless_asked(folder: Path) -> None:
    weights: Any = mx.load(str(folder / "model.safetensors"))
    halves = {name: array.astype(mx.bfloat16) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), halves)
    assert load_model(folder).dtype == "float32"
    kept = load_model(folder, dtype="bfloat16")
    assert kept.dtype == "bfloat16"
    with ModelAdapter(kept, make_backend("auto")) as adapter:
        assert adapter.layout.dtype == "bfloat16"


def huge_folder(folder: Path, num_bytes: int) -> Path:
    """A folder whose embedding has that size: a file with a hole, which takes no room."""
    path, name = folder / "model.safetensors", "model.embed_tokens.weight"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:start])
    end = len(data) - start
    rows, width = num_bytes // 128, 32
    offsets = [end, end + 4 * rows * width]
    tensors[name] = {"dtype": "F32", "shape": [rows, width], "data_offsets": offsets}
    header = json.dumps(tensors).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + data[start:])
        file.truncate(8 + len(header) + offsets[1])
    edit_config(folder, vocab_size=rows, tie_word_embeddings=True)
    return folder


def test_a_model_bigger_than_memory_is_refused_with_the_numbers_before_it_is_read(
    folder: Path,
) -> None:
    huge_folder(folder, 128 * 2**30)
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder, max_bytes=8 * 2**30)
    assert "its weights in float32 take 128.0 GiB of memory, and 8.0 GiB are" in str(caught.value)
    assert "smaller" in caught.value.hint
    with pytest.raises(ModelLoadError, match=r"in bfloat16 take 64\.0 GiB"):
        load_model(folder, dtype="bfloat16", max_bytes=8 * 2**30)


@pytest.mark.parametrize(
    ("settings", "room"), [({"gpu_memory_utilization": 0.5}, "4.0"), ({"num_blocks": 4}, "8.0")]
)
def test_the_engine_refuses_what_the_device_has_no_room_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], room: str
) -> None:
    monkeypatch.setattr(memory, "device_memory_bytes", lambda: 8 * 2**30)
    huge_folder(folder, 10 * 2**30)
    with pytest.raises(ModelLoadError, match=f"take 10.0 GiB of memory, and {room} GiB are there"):
        LLM(folder, **settings)


def test_a_quantised_model_that_only_its_expansion_makes_too_big_says_how_to_keep_it(
    tmp_path: Path,
) -> None:
    folder = save_tiny_folder(tmp_path / "model")
    edit_config(folder, intermediate_size=64)
    model = build_model({**CONFIGS["llama"], "intermediate_size": 64})
    nn.quantize(model, group_size=32, bits=4)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    edit_config(folder, quantization={"group_size": 32, "bits": 4})
    size = load_model(folder, dtype="float16").parameter_bytes
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder, max_bytes=size)
    assert caught.value.hint.startswith("--dtype float16 keeps them quantised")
    assert load_model(folder, dtype="float16", max_bytes=size).dtype == "float16"


def test_nothing_at_the_path_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        load_model(tmp_path / "none")


@pytest.mark.parametrize(
    ("missing", "words"),
    [("config.json", "config.json is missing"), ("model.safetensors", "no weights")],
)
def test_a_folder_without_a_part_says_which(folder: Path, missing: str, words: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelLoadError, match=words) as caught:
        load_model(folder)
    assert caught.value.hint


def test_a_folder_with_only_a_gguf_file_names_the_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "m.gguf").touch()
    with pytest.raises(ModelLoadError, match="GGUF file and no config") as caught:
        load_model(folder)
    assert caught.value.hint == f"give {folder / 'm.gguf'}"


def test_messages_call_the_model_by_the_name_that_the_user_knows(folder: Path) -> None:
    told: list[str] = []
    load_model(folder, name="owner/model", on_progress=lambda what, _: told.append(what))
    assert told[0] == "reading owner/model"
    assert told[-1] == "loading owner/model"
    for file in ("generation_config.json", "model.safetensors", "config.json"):
        (folder / file).write_text("{")
        with pytest.raises(ModelLoadError, match=r"^owner/model: "):
            load_model(folder, name="owner/model")


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="model-00002-of-00002"):
        load_model(folder)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
def test_truncated_weights_are_one_clear_error(folder: Path, share: float) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "can't be read"),
        ("[]", "not a JSON object"),
        ("\xff", "can't be read"),
        ("{}", "model_type None"),
        ('{"model_type": "../llama"}', "model_type"),
        ('{"model_type": "llama"}', "can't load"),
    ],
)
def test_a_damaged_config_is_one_clear_error(folder: Path, text: str, words: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=words):
        load_model(folder)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", [4], 10**12])
@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_an_absurd_size_is_refused_by_name_before_anything_is_made(
    folder: Path, field: str, value: Any
) -> None:
    for prefix, change in {
        "": {field: value},
        "text_config.": {"text_config": {field: value}},
    }.items():
        edit_config(folder, **change)
        with pytest.raises(ModelLoadError, match=f"has {prefix}{field} ") as caught:
            load_model(folder)
        assert caught.value.hint.startswith("it must be a whole number from 1 to ")


def test_a_config_that_contradicts_the_weights_is_an_error(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=5)
    with pytest.raises(ModelLoadError, match="can't load"):
        load_model(folder)


@pytest.mark.parametrize("name", ["no_such_model", "base"])
def test_an_unknown_model_type_is_refused_by_name(folder: Path, name: str) -> None:
    edit_config(folder, model_type=name)
    with pytest.raises(ModelLoadError, match=name):
        load_model(folder)


def test_code_of_the_model_runs_only_when_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    edit_config(folder, model_file="model.py")
    (folder / "model.py").write_text(
        "from pathlib import Path\n"
        "from mlx_lm.models.llama import Model, ModelArgs\n"
        f"Path({str(trace)!r}).touch()\n"
    )
    with pytest.raises(UnsupportedModelError, match=r"model\.py") as caught:
        load_model(folder)
    assert "--trust-remote-code" in caught.value.hint
    assert not trace.exists()
    load_model(folder, trust_remote_code=True)
    assert trace.exists()


def test_model_code_that_exits_does_not_end_the_process(folder: Path) -> None:
    edit_config(folder, model_file="model.py")
    (folder / "model.py").write_text("raise SystemExit('a package is missing')\n")
    with pytest.raises(ModelLoadError, match="a package is missing"):
        load_model(folder, trust_remote_code=True)
