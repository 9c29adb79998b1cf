"""Writes small GGUF files byte by byte, sound ones and (by overrides) unsound ones."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30} | {
    "Q5_0": 6,
    "Q4_K": 12,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "I32": 26,
    "MXFP4": 39,
}

VOCAB_SIZE = 64
HIDDEN = 32


@dataclass
class GGUFFile:
    """The parts of a file; ``encode`` puts them together."""

    metadata: dict[str, tuple[int, Any]] = field(default_factory=dict)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_metadata: int | None = None

    def encode(self) -> bytes:
        """The file's bytes."""
        return self.encode_header() + self.encode_data()

    def encode_header(self) -> bytes:
        """Everything before the tensors' data, padded to the alignment."""
        out = self.magic + struct.pack(
            "<IQQ",
            self.version,
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(self.metadata) if self.num_metadata is None else self.num_metadata,
        )
        for key, (kind, value) in self.metadata.items():
            out += _string(key) + struct.pack("<I", kind) + _value(kind, value)
        offset = 0
        for name, (type_name, shape, data) in self.tensors.items():
            out += _string(name) + struct.pack("<I", len(shape))
            out += struct.pack(f"<{len(shape)}Q", *reversed(shape))
            out += struct.pack("<IQ", TYPE_IDS[type_name], offset)
            offset += len(_pad(data))
        return _pad(out)

    def encode_data(self) -> bytes:
        """The tensors' data."""
        return b"".join(_pad(data) for _, _, data in self.tensors.values())

    def write(self, path: Path) -> Path:
        """Write the file."""
        path.write_bytes(self.encode())
        return path


def _pad(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 32)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        item_kind, items = value
        head = struct.pack("<IQ", item_kind, len(items))
        return head + b"".join(_value(item_kind, item) for item in items)
    code = {UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "B"}[kind]
    return struct.pack(f"<{code}", value)


def encode_tensor(type_name: str, values: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Bytes of a tensor and the float64 values that they stand for."""
    if type_name == "F32":
        return values.astype("<f4").tobytes(), values.astype("<f4").astype(np.float64)
    if type_name == "F16":
        return values.astype("<f2").tobytes(), values.astype("<f2").astype(np.float64)
    if type_name == "BF16":
        bits = values.astype("<f4").view("<u4") >> 16
        known = (bits << 16).astype("<u4").view("<f4").astype(np.float64)
        return bits.astype("<u2").tobytes(), known
    blocks = values.reshape(-1, 32).astype(np.float64)
    high, low = blocks.max(axis=1), blocks.min(axis=1)
    if type_name == "Q8_0":
        scale = (np.abs(blocks).max(axis=1) / 127).astype("<f2")
        quants = np.rint(blocks / scale[:, None].astype(np.float64)).astype(np.int8)
        raw = b"".join(s.tobytes() + q.tobytes() for s, q in zip(scale, quants, strict=True))
        known = quants * scale[:, None].astype(np.float64)
    else:
        if type_name == "Q4_0":
            scale = (np.abs(blocks).max(axis=1) / 7).astype("<f2")
            minimum = None
            floor = -8.0 * scale.astype(np.float64)
        else:
            scale = ((high - low) / 15).astype("<f2")
            minimum = low.astype("<f2")
            floor = minimum.astype(np.float64)
        steps = (blocks - floor[:, None]) / scale[:, None].astype(np.float64)
        quants = np.clip(np.rint(steps), 0, 15).astype(np.uint8)
        known = quants * scale[:, None].astype(np.float64) + floor[:, None]
        packed = quants[:, :16] | (quants[:, 16:] << 4)
        raw = b""
        for index, block in enumerate(packed):
            raw += scale[index].tobytes()
            raw += minimum[index].tobytes() if minimum is not None else b""
            raw += block.tobytes()
    return raw, known.reshape(values.shape)


def tiny_llama_gguf(
    *, types: Mapping[str, str] | None = None, tied: bool = True, seed: int = 0
) -> tuple[GGUFFile, dict[str, np.ndarray]]:
    """A llama of two layers, and the values of its tensors in float64 by name.

    Args:
        types: Tensor name's last part before ``.weight``, to its type; F32 otherwise.
        tied: Leave out ``output.weight``.
        seed: Of the weights.
    """
    inner, keys = 64, 16
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB_SIZE, HIDDEN)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (keys, HIDDEN),
            f"blk.{layer}.attn_v": (keys, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (inner, HIDDEN),
            f"blk.{layer}.ffn_up": (inner, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, inner),
        }
    shapes["output_norm"] = (HIDDEN,)
    if not tied:
        shapes["output"] = (VOCAB_SIZE, HIDDEN)
    rng = np.random.default_rng(seed)
    file = GGUFFile(
        metadata={
            "general.architecture": (STRING, "llama"),
            "llama.block_count": (UINT32, 2),
            "llama.context_length": (UINT32, 256),
            "llama.embedding_length": (UINT32, HIDDEN),
            "llama.feed_forward_length": (UINT32, inner),
            "llama.attention.head_count": (UINT32, 4),
            "llama.attention.head_count_kv": (UINT32, 2),
            "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
            "llama.rope.freq_base": (FLOAT32, 10000.0),
            "llama.rope.dimension_count": (UINT32, 8),
            "tokenizer.ggml.model": (STRING, "gpt2"),
            "tokenizer.ggml.tokens": (ARRAY, (STRING, [f"t{i}é" for i in range(VOCAB_SIZE)])),
            "tokenizer.ggml.token_type": (ARRAY, (INT32, [1] * VOCAB_SIZE)),
            "tokenizer.ggml.eos_token_id": (UINT32, 2),
            "tokenizer.ggml.add_bos_token": (BOOL, False),
        }
    )
    known = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape) * 0.3
        if len(shape) == 1:
            values = values + 1.0
        type_name = (types or {}).get(name.rpartition(".")[2], "F32")
        raw, known[name] = encode_tensor(type_name, values)
        file.tensors[f"{name}.weight"] = (type_name, shape, raw)
    return file, known
