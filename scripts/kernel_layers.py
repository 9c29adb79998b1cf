"""Attention layers to time on a GPU, as deep as a model, over pools that no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import BatchArrays, batch_of
from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.engine.memory import device_memory_bytes
from pagedmlx.kv.layout import AxisOrder, KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import AttentionParams, PagedBatch
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import MLXLauncher, Platform, gpu_platform

BLOCK_SIZE = 16
CHAIN = 32
"""Calls that depend on each other in one step, as the layers of a model do."""
STEPS = 6
"""Steps that are dispatched before any is waited for."""
ROUNDS = 5
# Twice what the largest level-2 cache of the GPUs measured holds, twice.
ROTATED_BYTES = 256 << 20


@dataclass(frozen=True)
class Shape:
    """Sequences by their contexts, all of which begin with ``shared`` tokens, and the heads."""

    name: str
    contexts: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    shared: int = 0

    @property
    def layer_bytes(self) -> int:
        """K and V that one layer must read."""
        return (sum(self.contexts) - (len(self.contexts) - 1) * self.shared) * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of a token in one layer, in bf16."""
        return self.num_kv_heads * self.head_dim * 4


class Layers:
    """A pool with enough layers that rotating over them defeats the caches."""

    def __init__(
        self,
        shape: Shape,
        order: AxisOrder = AxisOrder.HEAD_MAJOR,
        num_rows: int = 1,
        prefill: str = "auto",
        decode: str = "auto",
        cascade: str = "off",
        columns: int | None = None,
    ) -> None:
        self.shape = shape
        self.num_layers = min(64, max(4, -(-ROTATED_BYTES // shape.layer_bytes)))
        dims = LayerShape(shape.num_kv_heads, shape.head_dim, shape.head_dim)
        layout = KVLayout(
            block_size=BLOCK_SIZE,
            dtype="bfloat16",
            layers=(dims,) * self.num_layers,
            groups=(KVGroup(KVGroupKind.FULL, tuple(range(self.num_layers))),),
            order=order,
        )
        spans = [(context - num_rows, num_rows) for context in shape.contexts]
        self.num_blocks = sum(-(-context // BLOCK_SIZE) for context in shape.contexts)
        self.launcher = MLXLauncher(find_platform())
        self.store = KVStore(layout, (self.num_blocks,), 0.01, InPlaceWriter(self.launcher))
        self.host = lay_out(spans, self.num_blocks, shape.shared)
        self.batch = PagedBatch(self.host)
        mx.eval(self.batch.groups[0].slot_mapping)
        self.backend = KernelBackend(
            self.launcher, prefill=prefill, decode=decode, cascade=cascade, columns=columns
        )
        self.params = AttentionParams(scale=shape.head_dim**-0.5)
        self.queries = normal((self.host.num_rows, shape.num_heads, shape.head_dim))
        rows = (self.host.num_rows, shape.num_kv_heads, shape.head_dim)
        self.keys, self.values = normal(rows), normal(rows)
        mx.eval(self.queries, self.keys, self.values)

    def chain(self, batch: PagedBatch, write: bool, length: int = CHAIN) -> mx.array:
        """A step: each layer's output is the next one's query."""
        output = self.queries
        for index in range(length):
            layer = index % self.num_layers
            if write:
                slots = batch.groups[0].slot_mapping
                self.store.write(layer, self.keys, self.values, slots)
            output = self.backend.attend(output, layer, 0, self.store, batch, self.params)
        return output


def measure_ceiling() -> dict[str, float]:
    """Read bandwidth: 8 large sums in one evaluation, in at most an eighth of the memory."""
    size = min(1 << 27, device_memory_bytes() // 8 // 8 // 4)
    arrays = [mx.full((size,), 1.0, mx.float32) for _ in range(8)]
    mx.eval(arrays)

    def once() -> None:
        mx.eval([array.sum() for array in arrays])

    return {"gb_per_s": round(sum(array.nbytes for array in arrays) / best(once, 20) / 1e9)}


def lay_out(spans: Sequence[tuple[int, int]], num_blocks: int, shared: int = 0) -> BatchArrays:
    """Sequences that compute tokens [start, start + count), with shuffled block tables; all begin
    with the same blocks of ``shared`` tokens.
    """
    widths = np.array([-(-sum(span) // BLOCK_SIZE) for span in spans])
    ids = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    tables = np.full((len(spans), widths.max()), -1, np.int32)
    for row, at, width in zip(tables, np.cumsum(widths) - widths, widths, strict=True):
        row[:width] = ids[at : at + width]
    tables[:, : shared // BLOCK_SIZE] = tables[0, : shared // BLOCK_SIZE]
    return batch_of(spans, [tables], BLOCK_SIZE)


def best(run: Callable[[], None], rounds: int = ROUNDS) -> float:
    """Seconds of the fastest of some rounds, after two that warm up."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def normal(shape: tuple[int, ...]) -> mx.array:
    """Random bfloat16."""
    return mx.random.normal(shape).astype(mx.bfloat16)


def find_platform() -> Platform:
    """That of the default device, which must be a GPU."""
    platform = gpu_platform()
    assert platform is not None
    return platform
