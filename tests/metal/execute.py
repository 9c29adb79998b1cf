"""Executes a Metal source on this machine's processor: fibers for threads, every access checked.

The compiler is told to sanitize threads, which announces each load and store; the calls land in
shim/runtime.cpp, which knows all bounds and who touched a byte last.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import math
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.metal.clang import SHIM, cached_path, link_shared, run_clang, shim_flags
from tests.metal.source import ITEM_BYTES, Kernel, parse, translate

_COMMON = ["-std=c++17", "-fPIC", "-fno-exceptions", "-w", "-fno-color-diagnostics"]
_CHECKED = [
    *_COMMON, "-O1", "-fsanitize=thread",
    "-fsanitize=array-bounds,alignment,shift,integer-divide-by-zero,signed-integer-overflow",
    "-fno-sanitize-recover=all", "-ftrivial-auto-var-init=pattern",
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
    "-Xclang", "-cl-single-precision-constant", "-mllvm", "-tsan-instrument-read-before-write",
]  # fmt: skip
_MAX_THREADS = 1024
_MAX_GROUPS = (1 << 20) - 1
_ALIGNMENT = 256
_GAP_BYTES = 1 << 20
_POISON = 0xFF  # NaN in every float type

_TABLES = ("shape", "strides", "ndim")


class ExecutionError(Exception):
    """A fault that the runtime saw, or a kernel that can't be run.

    Attributes:
        kind: divergence, out_of_bounds, race, uninitialised, read_only, misaligned, overflow,
            endless, compile or arguments.
        line: Line of the source that the thread was at, or had last waited at; 0 if none.
    """

    def __init__(self, kind: str, line: int, message: str, text: str = "") -> None:
        lines = text.splitlines()
        where = (
            f"\n  at or after line {line}: {lines[line - 1].strip()}"
            if 0 < line <= len(lines)
            else ""
        )
        super().__init__(f"{kind}: {message}{where}")
        self.kind = kind
        self.line = line


@dataclass(frozen=True, slots=True)
class Output:
    """Shape and type of an output; bfloat16 is np.uint16."""

    shape: tuple[int, ...]
    dtype: np.dtype


class _Region(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("cells", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("item_bytes", ctypes.c_uint32),
        ("writable", ctypes.c_uint32),
        ("initialised", ctypes.c_uint32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("regions", ctypes.POINTER(_Region)),
        ("stacks", ctypes.c_void_p),
        ("shared_cells", ctypes.c_void_p),
        ("num_regions", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("report", ctypes.c_char * 2048),
    )


def execute(
    text: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, Output],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    *,
    in_place: Collection[str] = (),
    initial: float | None = None,
    strided: bool = False,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Run a source as `mx.fast.metal_kernel` generates it.

    Args:
        text: The generated source.
        inputs: Arrays by name; bfloat16 as np.uint16 of the same bits.
        outputs: Outputs by name. Bytes that no thread writes are 0xFF, unless `initial` is given.
        grid: Threads of the launch, as for MLX.
        threadgroup: Threads of a threadgroup, cut to the grid as MLX does.
        in_place: Inputs that the kernel may write; copies of them come back with the outputs.
        initial: What the outputs hold before.
        strided: Bind inputs as they lie in memory; what lies in between is 0xFF. Otherwise they are
            copied, as MLX does it too.
        seed: Order in which threads and threadgroups run.

    Raises:
        ExecutionError: The first fault.
    """
    kernel = parse(text)
    library = _load(kernel)
    arrays = dict(inputs)
    if not strided:
        arrays = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
    for name, output in outputs.items():
        array = np.full(output.shape, 0 if initial is None else initial, output.dtype)
        if initial is None:
            array.reshape(-1).view(np.uint8)[:] = _POISON
        arrays[name] = array
    writable = {*in_place, *outputs}
    bound = [_bound_array(kernel, buffer.name, arrays, text) for buffer in kernel.buffers]
    for buffer, array in zip(kernel.buffers, bound, strict=True):
        if array.itemsize != ITEM_BYTES[buffer.type]:
            raise ExecutionError("arguments", 0, f"{buffer.name}: {array.dtype} for {buffer.type}")

    memory = _Memory(library, bound)
    regions = (_Region * len(bound))()
    for region, buffer, array, place in zip(
        regions, kernel.buffers, bound, memory.places, strict=True
    ):
        region.start = place
        region.bytes = array.nbytes
        region.cells = memory.cells(array.nbytes)
        region.name = buffer.name.encode()
        region.item_bytes = array.itemsize
        region.writable = buffer.name in writable
        region.initialised = buffer.name not in outputs or initial is not None
    launch = _Launch(
        buffers=(ctypes.c_void_p * len(bound))(*memory.places),
        regions=regions,
        stacks=memory.raw(_MAX_THREADS * library.msl_sizeof(3)),
        shared_cells=memory.cells(library.msl_threadgroup_bytes()),
        num_regions=len(bound),
        seed=seed + 1,
        grid=tuple(grid),
        group=tuple(min(a, b) for a, b in zip(threadgroup, grid, strict=True)),
    )
    group = math.prod(launch.group)
    if not 0 < group <= _MAX_THREADS or math.prod(grid) // group > _MAX_GROUPS // 8:
        raise ExecutionError("arguments", 0, f"threadgroup of {threadgroup}, grid of {grid}")
    library.msl_run(ctypes.byref(launch))
    if launch.report:
        kind, line, message = launch.report.decode(errors="replace").split("|", 2)
        raise ExecutionError(kind, int(line), message, text)
    return {
        buffer.name: memory.read(place, array)
        for buffer, array, place in zip(kernel.buffers, bound, memory.places, strict=True)
        if buffer.name in writable
    }


def threadgroup_bytes(text: str) -> int:
    """Threadgroup memory that a source takes, as compiled."""
    return _load(parse(text)).msl_threadgroup_bytes()


def _bound_array(
    kernel: Kernel, name: str, arrays: Mapping[str, np.ndarray], text: str
) -> np.ndarray:
    """The array bound to a parameter; shapes, strides and ranks are those of another array."""
    if name in arrays:
        return _as_it_lies(arrays[name])
    source, _, table = name.rpartition("_")
    if table not in _TABLES or source not in arrays:
        raise ExecutionError("arguments", 0, f"no array for {name} of {kernel.name}", text)
    array = arrays[source]
    if table == "shape":
        return np.array(array.shape, np.int32)
    if table == "strides":
        return np.array(array.strides, np.int64) // array.itemsize
    return np.array(array.ndim, np.int32)


def _as_it_lies(array: np.ndarray) -> np.ndarray:
    """All memory from an array's first element to its last."""
    if array.flags.c_contiguous:
        return array
    ends = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    memory = np.full(sum(ends) + array.itemsize, _POISON, np.uint8).view(array.dtype)
    np.lib.stride_tricks.as_strided(memory, array.shape, array.strides)[...] = array
    return memory


class _Memory:
    """Memory of one launch. Buffers lie far apart, so that a wrong index falls in between."""

    def __init__(self, library: ctypes.CDLL, arrays: list[np.ndarray]) -> None:
        self._cell_bytes = library.msl_sizeof(0)
        self._kept: list[np.ndarray] = []
        gap = max([_GAP_BYTES, *(array.nbytes for array in arrays)])
        offsets = []
        offset = gap
        for array in arrays:
            offsets.append(offset)
            offset += (array.nbytes + gap + _ALIGNMENT) // _ALIGNMENT * _ALIGNMENT
        base = self.raw(offset + _ALIGNMENT)
        base += -base % _ALIGNMENT
        self.places = [base + at // _ALIGNMENT * _ALIGNMENT for at in offsets]
        for place, array in zip(self.places, arrays, strict=True):
            ctypes.memmove(place, array.ctypes.data, array.nbytes)

    def raw(self, num_bytes: int) -> int:
        # Zeros that the system lends page by page: what isn't touched costs nothing.
        self._kept.append(np.zeros(num_bytes + 64, np.uint8))
        address = self._kept[-1].ctypes.data
        return address + -address % 64

    def cells(self, num_bytes: int) -> int:
        return self.raw(num_bytes * self._cell_bytes)

    def read(self, place: int, like: np.ndarray) -> np.ndarray:
        return np.frombuffer(ctypes.string_at(place, like.nbytes), like.dtype).reshape(like.shape)


@functools.lru_cache(maxsize=64)
def _load(kernel: Kernel) -> ctypes.CDLL:
    program = "\n".join(
        (
            "template <size_t BYTES> inline void msl_measure() {}",
            '#line 1 "kernel"',
            translate(kernel),
            '#line 1 "call"',
            _call(kernel),
        )
    )
    path = cached_path(".so", program, *_CHECKED)
    if not path.exists():
        code = path.with_name(f"{path.stem}-{os.getpid()}.o")
        runtime = cached_path("-runtime.o")
        if not runtime.exists():
            _compile((SHIM / "runtime.cpp").read_text(), runtime, [*_COMMON, "-O2", "-c"])
        _compile(program, code, [*shim_flags(*_CHECKED), "-c"])
        built = code.with_suffix(".so")
        link_shared([code, runtime], built)
        built.replace(path)
        code.unlink()
    if sys.platform == "linux":
        ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6", mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.msl_run.restype = None
    for name in ("msl_sizeof", "msl_threadgroup_bytes"):
        getattr(library, name).restype = ctypes.c_uint64
    if library.msl_sizeof(1) != ctypes.sizeof(_Region) or library.msl_sizeof(2) != ctypes.sizeof(
        _Launch
    ):
        raise ExecutionError("compile", 0, "execute.py and runtime.cpp disagree on a layout")
    return library


def _compile(program: str, target: Path, flags: list[str]) -> None:
    part = target.with_name(f"{target.name}.{os.getpid()}")
    done = run_clang([*flags, "-o", str(part)], program)
    if done.returncode:
        raise ExecutionError("compile", 0, done.stderr.strip())
    part.replace(target)


def _call(kernel: Kernel) -> str:
    """A function that calls the kernel for one place in the grid."""
    arguments = []
    for index, buffer in enumerate(kernel.buffers):
        const = "const " if buffer.const else ""
        pointer = f"static_cast<{const}{buffer.type}*>(buffers[{index}])"
        arguments.append(pointer if buffer.pointer else f"*{pointer}")
    for name in kernel.attributes:
        at = f"place.{name}"
        wide = name.endswith(("_in_grid", "_per_grid", "_in_threadgroup", "_per_threadgroup"))
        scalar = name.startswith(("thread_index_", "simdgroup"))
        arguments.append(f"uint3{{{at}[0], {at}[1], {at}[2]}}" if wide and not scalar else at)
    return (
        '__attribute__((no_sanitize("thread"))) extern "C" void msl_call(\n'
        "    void* const* buffers, const msl::Place& place) {\n"
        f"  {kernel.instance}({', '.join(arguments)});\n"
        "}"
    )
