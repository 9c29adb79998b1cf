"""Reads and checks the header of a GGUF file in pure Python, before MLX is let near it.

Owns the file format only; what the metadata of an architecture means is in ``gguf_models``.
The format is that of the GGUF specification, versions 2 and 3, little endian.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedmlx.errors import ModelLoadError, UnsupportedModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16
MAX_DIMS = 4
MAX_NAME_BYTES = 256
MAX_DIM = 2**31 - 1

# Bytes of the smallest possible entry: an empty name and a one-byte value, or no dimensions.
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    _BOOL: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_UINT32 = 4


@dataclass(frozen=True, slots=True)
class TensorType:
    """How a tensor type stores its elements: ``block_bytes`` for each ``block_elements``."""

    name: str
    block_elements: int
    block_bytes: int


TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    8: TensorType("Q8_0", 32, 34),
    30: TensorType("BF16", 1, 2),
}
"""The types that are read without a loss: as they are, or as MLX's own quantised form."""

_OTHER_TYPE_NAMES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    39: "MXFP4",
    40: "NVFP4",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file.

    Attributes:
        name: As written in the file.
        shape: Row major, the fastest dimension last (the file has it first).
        type: Name of the element type.
        offset: Of the first byte, from the start of the file.
        num_bytes: Size in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything in front of the tensors' data.

    Attributes:
        version: Of the format.
        metadata: Key to a plain Python value: str, int, float, bool, or a list of one of them.
        tensors: By name, in the file's order.
    """

    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_header(path: str | Path) -> GGUFHeader:
    """Read the header and check that every count and every tensor lies within the file.

    Args:
        path: A ``.gguf`` file.

    Raises:
        ModelLoadError: The file is missing, unreadable, truncated or damaged.
        UnsupportedModelError: The file is sound but of a version or a tensor type not read here.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise ModelLoadError(
                    f"{path.name}: {size} bytes are too few for a GGUF file", hint=_HINT
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Reader(data, path.name))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ModelLoadError(f"{path.name}: can't be read: {reason}") from error


_HINT = "the file is incomplete or damaged; fetch it again"


class _Reader:
    """A cursor over the file that never reads past its end."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.file_name = name
        self.size = len(data)
        self.position = 0

    def fail(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.file_name}: {message}", hint=_HINT)

    def take(self, num_bytes: int, what: str) -> int:
        start = self.position
        if num_bytes > self.size - start:
            raise self.fail(
                f"{what} needs {num_bytes} bytes at {start}, past the file's end at {self.size}"
            )
        self.position = start + num_bytes
        return start

    def numbers(self, code: str, count: int, what: str) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        start = self.take(count * struct.calcsize(f"<{code}"), what)
        return struct.unpack_from(layout, self.data, start)

    def uint32(self, what: str) -> int:
        return self.numbers("I", 1, what)[0]

    def uint64(self, what: str) -> int:
        return self.numbers("Q", 1, what)[0]

    def name_of(self, what: str) -> str:
        """A key or a tensor's name: short, so that it can be shown in a message."""
        return self.string(what, MAX_NAME_BYTES)

    def string(self, what: str, max_bytes: int | None = None) -> str:
        length = self.uint64(what)
        if max_bytes is not None and length > max_bytes:
            raise self.fail(f"{what} has {length} bytes; {max_bytes} are possible")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} at {start} is not UTF-8") from None


def _parse(reader: _Reader) -> GGUFHeader:
    start = reader.take(4, "the magic number")
    if reader.data[start : start + 4] != MAGIC:
        raise ModelLoadError(
            f"{reader.file_name}: not a GGUF file", hint="the first bytes aren't GGUF"
        )
    version = reader.uint32("the version")
    if version not in VERSIONS:
        raise UnsupportedModelError(
            f"{reader.file_name}: GGUF version {version} is not read; only 2 and 3 are",
            hint="convert the model again with a current converter",
        )
    num_tensors = reader.uint64("the tensor count")
    num_metadata = reader.uint64("the metadata count")
    for count, least, what in (
        (num_tensors, _MIN_TENSOR_BYTES, "tensors"),
        (num_metadata, _MIN_METADATA_BYTES, "metadata entries"),
    ):
        if count > (reader.size - reader.position) // least:
            raise reader.fail(f"{count} {what} can't fit in {reader.size} bytes")
    metadata: dict[str, Any] = {}
    alignment = DEFAULT_ALIGNMENT
    for _ in range(num_metadata):
        key = reader.name_of("a metadata key")
        if key in metadata:
            raise reader.fail(f"metadata {key!r} occurs twice")
        kind = reader.uint32(f"the type of {key!r}")
        metadata[key] = _read_value(reader, kind, key)
        if key == "general.alignment":
            alignment = metadata[key]
            if kind != _UINT32 or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
                raise reader.fail(f"general.alignment is {alignment!r}, not a multiple of 8")
    entries = [_read_tensor(reader) for _ in range(num_tensors)]
    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset in entries:
        if name in tensors:
            raise reader.fail(f"tensor {name!r} occurs twice")
        if offset % alignment:
            raise reader.fail(f"tensor {name!r}: offset {offset} is not a multiple of {alignment}")
        tensors[name] = _check_tensor(reader, name, shape, type_id, data_start + offset)
    _check_overlap(reader, tensors)
    return GGUFHeader(version=version, metadata=metadata, tensors=tensors)


def _read_value(reader: _Reader, kind: int, key: str) -> Any:
    if kind == _STRING:
        return reader.string(f"metadata {key!r}")
    if kind == _ARRAY:
        return _read_array(reader, key)
    return _read_scalars(reader, kind, 1, key)[0]


def _read_array(reader: _Reader, key: str) -> list[Any]:
    what = f"metadata {key!r}"
    kind = reader.uint32(what)
    count = reader.uint64(what)
    if kind == _STRING:
        if count > (reader.size - reader.position) // 8:
            raise reader.fail(f"{what}: {count} strings can't fit in {reader.size} bytes")
        return [reader.string(what) for _ in range(count)]
    return _read_scalars(reader, kind, count, key)


def _read_scalars(reader: _Reader, kind: int, count: int, key: str) -> list[Any]:
    code = _SCALARS.get(kind)
    if code is None:
        raise reader.fail(f"metadata {key!r} has the unknown type {kind}")
    # The size is checked before the format string is built: struct refuses absurd counts oddly.
    if count > reader.size:
        raise reader.fail(f"metadata {key!r}: {count} values can't fit in {reader.size} bytes")
    values = reader.numbers(code, count, f"metadata {key!r}")
    if kind != _BOOL:
        return list(values)
    if any(value > 1 for value in values):
        raise reader.fail(f"metadata {key!r}: a boolean is neither 0 nor 1")
    return [bool(value) for value in values]


def _read_tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.name_of("a tensor's name")
    what = f"tensor {name!r}"
    num_dims = reader.uint32(what)
    if not 1 <= num_dims <= MAX_DIMS:
        raise reader.fail(f"{what} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
    dims = reader.numbers("Q", num_dims, what)
    if not all(1 <= dim <= MAX_DIM for dim in dims):
        raise reader.fail(f"{what} has the shape {dims}")
    return name, tuple(reversed(dims)), reader.uint32(what), reader.uint64(what)


def _check_tensor(
    reader: _Reader, name: str, shape: tuple[int, ...], type_id: int, offset: int
) -> TensorInfo:
    tensor_type = TENSOR_TYPES.get(type_id)
    if tensor_type is None:
        if type_id not in _OTHER_TYPE_NAMES:
            raise reader.fail(f"tensor {name!r} has the unknown type {type_id}")
        readable = ", ".join(known.name for known in TENSOR_TYPES.values())
        raise UnsupportedModelError(
            f"{reader.file_name}: tensor {name!r} is {_OTHER_TYPE_NAMES[type_id]}; "
            f"types read here: {readable}",
            hint="use a Q4_0, Q4_1, Q8_0, F16 or BF16 file of the model, or its MLX folder",
        )
    if shape[-1] % tensor_type.block_elements:
        raise reader.fail(
            f"tensor {name!r}: rows of {shape[-1]} can't be {tensor_type.name} "
            f"(blocks of {tensor_type.block_elements})"
        )
    elements = 1
    for dim in shape:
        elements *= dim
    num_bytes = elements // tensor_type.block_elements * tensor_type.block_bytes
    if offset + num_bytes > reader.size:
        raise reader.fail(
            f"tensor {name!r} ends at byte {offset + num_bytes}, past the file's end at "
            f"{reader.size}"
        )
    return TensorInfo(name, shape, tensor_type.name, offset, num_bytes)


def _check_overlap(reader: _Reader, tensors: Mapping[str, TensorInfo]) -> None:
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.num_bytes > after.offset:
            raise reader.fail(f"tensors {before.name!r} and {after.name!r} overlap")
