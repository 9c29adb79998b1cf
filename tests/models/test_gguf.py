from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from pagedmlx.errors import ModelLoadError, UnsupportedModelError
from pagedmlx.models.gguf import read_header
from pagedmlx.models.loader import LoadedModel, load_model
from tests.support.gguf_writer import (
    ARRAY,
    BOOL,
    FLOAT32,
    STRING,
    UINT32,
    VOCAB_SIZE,
    GGUFFile,
    encode_tensor,
    tiny_llama_gguf,
)

QUANTISED = {
    "token_embd": "Q8_0",
    "attn_q": "Q4_0",
    "attn_k": "Q4_1",
    "attn_v": "Q8_0",
    "ffn_up": "Q4_1",
    "ffn_gate": "F16",
    "ffn_down": "BF16",
}


def logits_of(loaded: LoadedModel) -> np.ndarray:
    model: Any = loaded.model
    return np.array(model(mx.arange(20)[None])[0].astype(mx.float32))


def test_metadata_comes_as_plain_python_values(tmp_path: Path) -> None:
    file, _ = tiny_llama_gguf()
    header = read_header(file.write(tmp_path / "m.gguf"))
    assert header.version == 3
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["tokenizer.ggml.tokens"] == [f"t{i}é" for i in range(VOCAB_SIZE)]
    assert header.metadata["tokenizer.ggml.add_bos_token"] is False
    assert header.metadata["llama.block_count"] == 2
    assert header.metadata["llama.rope.freq_base"] == 10000.0
    assert header.tensors["blk.0.ffn_down.weight"].shape == (32, 64)


def test_every_tensor_type_gives_the_values_that_its_bytes_stand_for(tmp_path: Path) -> None:
    file, known = tiny_llama_gguf(types=QUANTISED)
    loaded = load_model(file.write(tmp_path / "m.gguf"))
    model: Any = loaded.model
    layer = model.model.layers[1]
    for name, weight in {
        "token_embd": model.model.embed_tokens.weight,
        "blk.1.attn_q": layer.self_attn.q_proj.weight,
        "blk.1.attn_k": layer.self_attn.k_proj.weight,
        "blk.1.attn_v": layer.self_attn.v_proj.weight,
        "blk.1.attn_output": layer.self_attn.o_proj.weight,
        "blk.1.ffn_up": layer.mlp.up_proj.weight,
        "blk.1.ffn_gate": layer.mlp.gate_proj.weight,
        "blk.1.ffn_down": layer.mlp.down_proj.weight,
        "output_norm": model.model.norm.weight,
    }.items():
        assert weight.dtype == mx.float32
        # MLX keeps the offset of Q4_0 and Q8_0, -8 or -128 scales, in 16 bits.
        np.testing.assert_allclose(np.array(weight), known[name], atol=2e-2)
    assert loaded.dtype == "float32"
    assert loaded.eos_token_ids == {2}
    assert loaded.max_model_len == 256


def test_quantised_weights_stay_so_when_another_type_is_asked_for(tmp_path: Path) -> None:
    file, _ = tiny_llama_gguf(types=QUANTISED)
    path = file.write(tmp_path / "m.gguf")
    expanded, packed = load_model(path), load_model(path, dtype="float16")
    assert packed.dtype == "float16"
    assert packed.parameter_bytes < expanded.parameter_bytes / 2
    expected = logits_of(expanded)
    np.testing.assert_allclose(logits_of(packed), expected, atol=3e-2 * np.abs(expected).max())


def test_bfloat16_keeps_the_values_that_float16_would_lose(tmp_path: Path) -> None:
    file, _ = tiny_llama_gguf()
    values = np.full((32, 32), 2.0**100)
    raw, _ = encode_tensor("BF16", values)
    file.tensors["blk.0.attn_q.weight"] = ("BF16", values.shape, raw)
    model: Any = load_model(file.write(tmp_path / "m.gguf")).model
    np.testing.assert_array_equal(np.array(model.model.layers[0].self_attn.q_proj.weight), values)


def test_a_file_in_bfloat16_runs_in_bfloat16_when_the_type_is_kept(tmp_path: Path) -> None:
    names = ["token_embd", "attn_q", "attn_k", "attn_v", "attn_output"]
    names += ["ffn_up", "ffn_gate", "ffn_down"]
    file, _ = tiny_llama_gguf(types=dict.fromkeys(names, "BF16"))
    loaded = load_model(file.write(tmp_path / "m.gguf"), dtype="bfloat16")
    assert loaded.dtype == "bfloat16"
    parameters = tree_flatten(loaded.model.parameters())
    assert {array.dtype for _, array in parameters} == {mx.bfloat16}


def test_an_output_matrix_of_its_own_is_used(tmp_path: Path) -> None:
    file, known = tiny_llama_gguf(tied=False)
    loaded = load_model(file.write(tmp_path / "m.gguf"))
    model: Any = loaded.model
    assert loaded.config["tie_word_embeddings"] is False
    np.testing.assert_allclose(np.array(model.lm_head.weight), known["output"], atol=1e-6)


def test_linear_rope_scaling_is_honoured_and_other_kinds_are_refused(tmp_path: Path) -> None:
    file, _ = tiny_llama_gguf()
    plain = load_model(file.write(tmp_path / "plain.gguf"))
    file.metadata["llama.rope.scaling.type"] = (STRING, "linear")
    file.metadata["llama.rope.scaling.factor"] = (FLOAT32, 4.0)
    scaled = load_model(file.write(tmp_path / "scaled.gguf"))
    assert not np.allclose(logits_of(plain), logits_of(scaled), atol=1e-3)
    file.metadata["llama.rope.scaling.type"] = (STRING, "yarn")
    with pytest.raises(UnsupportedModelError, match="yarn"):
        load_model(file.write(tmp_path / "yarn.gguf"))


def _edit(**changes: Any) -> GGUFFile:
    file, _ = tiny_llama_gguf()
    for key, value in changes.items():
        setattr(file, key, value)
    return file


def _with_metadata(key: str, value: tuple[int, Any] | None) -> GGUFFile:
    file, _ = tiny_llama_gguf()
    if value is None:
        del file.metadata[key]
    else:
        file.metadata[key] = value
    return file


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (_edit(magic=b"GGML"), "not a GGUF file"),
        (_edit(num_tensors=2**63), "tensors can't fit"),
        (_edit(num_tensors=10_000), "tensors can't fit"),
        (_edit(num_tensors=21), "m.gguf"),
        (_edit(num_metadata=2**64 - 1), "metadata entries can't fit"),
        (_edit(num_metadata=14), "m.gguf"),
        (_edit(num_metadata=16), "m.gguf"),
        (_with_metadata("general.alignment", (UINT32, 0)), "alignment"),
        (_with_metadata("general.alignment", (UINT32, 2**31)), "alignment"),
        (_with_metadata("general.alignment", (STRING, "x" * 32)), "alignment"),
        (_with_metadata("general.architecture", None), "general.architecture"),
        (_with_metadata("llama.block_count", (UINT32, 2**31)), "block_count"),
        (_with_metadata("llama.block_count", (UINT32, 3)), r"blk\.2"),
        (_with_metadata("llama.block_count", (BOOL, 1)), "block_count"),
        (_with_metadata("llama.attention.head_count", (UINT32, 0)), "head_count"),
        (_with_metadata("llama.attention.head_count", (UINT32, 8)), "head size"),
        (_with_metadata("llama.attention.head_count_kv", (UINT32, 4)), "shape"),
        (_with_metadata("llama.feed_forward_length", (UINT32, 2**31 - 1)), "shape"),
        (_with_metadata("llama.context_length", (UINT32, 0)), "context_length"),
        (_with_metadata("llama.rope.freq_base", (FLOAT32, float("nan"))), "freq_base"),
        (_with_metadata("llama.attention.layer_norm_rms_epsilon", None), "epsilon"),
        (_with_metadata("extra", (BOOL, 7)), "boolean"),
    ],
)
def test_a_damaged_header_is_one_clear_error(tmp_path: Path, file: GGUFFile, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words) as caught:
        load_model(file.write(tmp_path / "m.gguf"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (_edit(version=1), "version 1"),
        (_edit(version=4), "version 4"),
        (_with_metadata("general.architecture", (STRING, "gemma3")), "'gemma3' is not supported"),
        (_with_metadata("general.architecture", (STRING, "qwen2moe")), "llama, qwen2, qwen3"),
        (_with_metadata("split.count", (UINT32, 3)), "one of 3 parts"),
        (_with_metadata("llama.expert_count", (UINT32, 8)), "mixture of experts"),
        (_with_metadata("llama.attention.value_length", (UINT32, 16)), "value_length"),
        (tiny_llama_gguf(types={"attn_norm": "F32"})[0], None),
    ],
)
def test_a_sound_file_of_another_kind_is_refused_by_name(
    tmp_path: Path, file: GGUFFile, words: str | None
) -> None:
    if words is None:
        file.tensors["blk.0.attn_q.bias"] = ("F32", (32,), b"\0" * 128)
        words = r"attn_q\.bias"
    with pytest.raises(UnsupportedModelError, match=words):
        load_model(file.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("type_name", ["Q4_K", "Q5_0", "Q6_K", "IQ4_NL", "I32", "MXFP4"])
def test_another_tensor_type_is_refused_by_name_before_mlx_sees_the_file(
    tmp_path: Path, type_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("MLX was given the file")

    monkeypatch.setattr(mx, "load", never)
    file, _ = tiny_llama_gguf()
    _, shape, data = file.tensors["blk.0.attn_q.weight"]
    file.tensors["blk.0.attn_q.weight"] = (type_name, shape, data)
    with pytest.raises(UnsupportedModelError, match=type_name):
        load_model(file.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("name", "type_name", "shape", "words"),
    [
        ("blk.0.attn_q.weight", "F32", (32, 2**20), "past the file's end"),
        ("blk.0.attn_q.weight", "F32", (2**31, 2**31), "shape"),
        ("blk.0.attn_q.weight", "F32", (0, 32), "shape"),
        ("blk.0.attn_q.weight", "F32", (1, 1, 1, 1, 32), "dimensions"),
        ("blk.0.attn_q.weight", "Q8_0", (32, 31), "rows of 31"),
        ("blk.0.attn_q.weight", "F32", (16, 32), "shape"),
        ("blk.0.attn_norm.weight", "F32", (1, 32), "shape"),
    ],
)
def test_an_absurd_tensor_is_one_clear_error(
    tmp_path: Path, name: str, type_name: str, shape: tuple[int, ...], words: str
) -> None:
    file, _ = tiny_llama_gguf()
    file.tensors[name] = (type_name, shape, file.tensors[name][2])
    with pytest.raises(ModelLoadError, match=words):
        load_model(file.write(tmp_path / "m.gguf"))


def test_a_file_bigger_than_memory_is_refused_before_mlx_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_llama_gguf()[0].write(tmp_path / "m.gguf")
    monkeypatch.setattr(mx, "load", None)
    with pytest.raises(ModelLoadError, match=r"weights take 80\.6 KiB of memory, and 1000 B are"):
        load_model(path, max_bytes=1000)


def test_strings_and_arrays_that_run_past_the_end_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    key = struct.pack("<Q", 1) + b"k"
    for value in (
        struct.pack("<IQ", STRING, 2**60),
        struct.pack("<IIQ", ARRAY, UINT32, 2**61),
        struct.pack("<IIQ", ARRAY, STRING, 2**40),
        struct.pack("<IIQ", ARRAY, STRING, 1) + struct.pack("<Q", 2**33),
        struct.pack("<IIQ", ARRAY, ARRAY, 1),
        struct.pack("<I", 99),
        struct.pack("<IQ", STRING, 2) + b"\xff\xfe",
    ):
        path.write_bytes(head + key + value + b"\0" * 8)
        with pytest.raises(ModelLoadError):
            read_header(path)


def test_overlapping_and_unaligned_tensors_are_errors(tmp_path: Path) -> None:
    file, _ = tiny_llama_gguf()
    data = file.encode()
    path = tmp_path / "m.gguf"
    for offset, words in ((0, "overlap"), (4, "multiple of 32")):
        # The last tensor's offset is the last 8 bytes of the unpadded header.
        start = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8 + 4
        path.write_bytes(data[:start] + struct.pack("<Q", offset) + data[start + 8 :])
        with pytest.raises(ModelLoadError, match=words):
            read_header(path)


def test_a_file_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    file, _ = tiny_llama_gguf()
    data = file.encode()
    path = tmp_path / "m.gguf"
    header_size = len(file.encode_header())
    for cut in [*range(0, header_size, 7), *range(header_size, len(data) - 32, 997)]:
        path.write_bytes(data[:cut])
        with pytest.raises(ModelLoadError):
            load_model(path)


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="can't be read"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(ModelLoadError, match="can't be read"):
        read_header(tmp_path)


TINY = tiny_llama_gguf(types={"attn_q": "Q8_0", "ffn_up": "Q4_1"})[0]
TINY_BYTES = TINY.encode()
TINY_HEADER_SIZE = len(TINY.encode_header())


@settings(max_examples=200)
@given(
    flips=st.lists(
        st.tuples(st.integers(0, TINY_HEADER_SIZE - 1), st.integers(0, 255)),
        min_size=1,
        max_size=3,
    )
)
def test_flipped_header_bytes_give_an_error_or_a_model_that_runs(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    data = bytearray(TINY_BYTES)
    for position, value in flips:
        data[position] = value
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(data)
    message = ""
    try:
        loaded = load_model(path)
    except ModelLoadError as error:
        message = str(error)
    else:
        assert logits_of(loaded).shape == (20, VOCAB_SIZE)
    assert "\n" not in message
