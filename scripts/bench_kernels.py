"""How fast the kernels are on this GPU, beside MLX's own attention and mlx-lm's caches.

python scripts/bench_kernels.py --json FILE [--only decode,prefill,..] [--peak]    (- is stdout)
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import BatchArrays, GroupArrays
from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.engine.memory import device_memory_bytes
from pagedmlx.kv.layout import AxisOrder, KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import NewRows, Rope
from pagedmlx.ops.base import AttentionParams, PagedBatch, upload
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import MLXLauncher, gpu_platform
from pagedmlx.ops.variants import DecodePath
from scripts.report import save
from scripts.trace import trace

BLOCK_SIZE = 16
CHAIN = 32
"""Calls that depend on each other in one step, as the layers of a model do."""
STEPS = 6
"""Steps that are dispatched before any is waited for."""
ROUNDS = 5
# Twice what the largest level-2 cache of the GPUs measured holds, twice.
ROTATED_BYTES = 256 << 20
_EMPTY = np.empty(0, np.int32)


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


MAIN = (
    Shape("16 x 4096", (4096,) * 16),
    Shape("64 x 2048", (2048,) * 64),
    Shape("1 x 32768", (32768,)),
    Shape("ragged", (16384, *(512,) * 7)),
    Shape("1 x 1024", (1024,)),
    Shape("16 x 512", (512,) * 16),
)
FACTORS = (
    Shape("factor 8, D 128, 16 x 4096", (4096,) * 16, 64, 8, 128),
    Shape("factor 8, D 128, 64 x 2048", (2048,) * 64, 64, 8, 128),
    Shape("factor 8, D 128, 1 x 32768", (32768,), 64, 8, 128),
    Shape("factor 8, D 64, 16 x 4096", (4096,) * 16, 64, 8, 64),
    Shape("factor 8, D 256, 16 x 4096", (4096,) * 16, 32, 4, 256),
    Shape("factor 16, D 128, 16 x 4096", (4096,) * 16, 64, 4, 128),
    Shape("factor 1, D 128, 16 x 1024", (1024,) * 16, 32, 32, 128),
)
"""Each by lanes and by matrices; matrices leave factor 1 to the lanes."""
SHARED = tuple(
    Shape(f"{count} x ({shared} shared + {own})", (shared + own,) * count, shared=shared)
    for count, shared, own in (
        *((16, 8192, 128), (16, 2048, 512), (8, 4096, 128), (4, 4096, 256), (2, 8192, 128)),
        *((64, 2048, 256), (64, 512, 512), (16, 512, 128), (2, 512, 64)),
    )
)
"""Each with and without a cascade: where it pays, and where it doesn't."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the kernels.")
    parser.add_argument("--json", required=True, metavar="FILE", help="result file; - is stdout")
    parser.add_argument("--only", default="", help="sections by name, with commas between")
    parser.add_argument("--peak", action="store_true", help="look for pool-sized allocations only")
    options = parser.parse_args()
    if gpu_platform() is None:
        sys.exit("bench_kernels.py: the default device is no GPU")

    sections: dict[str, Callable[[], Any]] = {
        "ceiling": measure_ceiling,
        "decode": lambda: _each(MAIN, measure_decode),
        "write_attend": lambda: _each(MAIN, partial(measure_decode, write=True)),
        "factors": lambda: [
            row
            for decode in DecodePath
            if decode is not DecodePath.AUTO
            for row in _each(FACTORS, partial(measure_decode, decode=decode))
        ],
        "cascade": lambda: _each(SHARED, measure_cascade),
        "slot_major": lambda: _each(MAIN[:4], partial(measure_decode, order=AxisOrder.SLOT_MAJOR)),
        "sdpa": lambda: [
            row for extra in (0, 1) for row in _each(MAIN[:2], partial(measure_sdpa, extra=extra))
        ],
        "batch_cache": lambda: _each(MAIN[:4], measure_batch_cache, padded=True),
        "prefill": lambda: [measure_prefill(2048, cached) for cached in (0, 8192)],
        "write": lambda: [measure_write(rows) for rows in (1, 16, 64, 2048)],
        "rope": lambda: [measure_rope(rows) for rows in (1, 16, 64, 2048)],
    }
    wanted = options.only.split(",") if options.only else list(sections)
    if options.peak:
        sections, wanted = {"peak": measure_peak}, ["peak"]
    result: dict[str, Any] = {"device": {k: str(v) for k, v in mx.device_info().items()}}
    for name in wanted:
        start = time.perf_counter()
        try:
            result[name] = sections[name]()
        except RuntimeError as error:  # what MLX raises; the other sections are still wanted
            result[name] = {"error": str(error)[:500]}
        mx.clear_cache()
        seconds = time.perf_counter() - start
        print(f"{name} ({seconds:.0f} s): {result[name]}", file=sys.stderr, flush=True)
    save(result, options.json)
    failed = any(isinstance(part, dict) and "error" in part for part in result.values())
    return 1 if failed or not result.get("peak", {"ok": True}).get("ok") else 0


def _each(
    shapes: Sequence[Shape], measure: Callable[[Shape], dict[str, Any]], padded: bool = False
) -> list[dict[str, Any]]:
    """Measure the shapes for which the machine's memory is large enough."""
    return [
        measure(shape)
        if _fits(shape, padded)
        else {"shape": shape.name, "left_out": "it takes more than a quarter of the memory"}
        for shape in shapes
    ]


def _fits(shape: Shape, padded: bool) -> bool:
    """Whether four layers, the least that is ever made, leave room for all else."""
    tokens = max(shape.contexts) * len(shape.contexts) if padded else sum(shape.contexts)
    return 4 * tokens * shape.token_bytes <= device_memory_bytes() // 4


def measure_ceiling() -> dict[str, float]:
    """Read bandwidth: 8 large sums in one evaluation, in at most an eighth of the memory."""
    size = min(1 << 27, device_memory_bytes() // 8 // 8 // 4)
    arrays = [mx.full((size,), 1.0, mx.float32) for _ in range(8)]
    mx.eval(arrays)

    def once() -> None:
        mx.eval([array.sum() for array in arrays])

    return {"gb_per_s": round(sum(array.nbytes for array in arrays) / _best(once, 20) / 1e9)}


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
        columns: int = 1,
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
        self.launcher = MLXLauncher(_platform())
        self.store = KVStore(layout, (self.num_blocks,), 0.01, InPlaceWriter(self.launcher))
        self.host = lay_out(spans, self.num_blocks, shape.shared)
        self.batch = upload(self.host)
        mx.eval(self.batch.groups[0].slot_mapping)
        self.backend = KernelBackend(
            self.launcher, prefill=prefill, decode=decode, cascade=cascade, columns=columns
        )
        self.params = AttentionParams(scale=shape.head_dim**-0.5)
        self.queries = _normal((self.host.num_rows, shape.num_heads, shape.head_dim))
        rows = (self.host.num_rows, shape.num_kv_heads, shape.head_dim)
        self.keys, self.values = _normal(rows), _normal(rows)
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


def measure_decode(
    shape: Shape,
    write: bool = False,
    order: AxisOrder = AxisOrder.HEAD_MAJOR,
    decode: str = "auto",
) -> dict[str, Any]:
    """Microseconds of a layer, pipelined; with the step's metadata resident and fresh."""
    layers = Layers(shape, order, decode=decode)
    result: dict[str, Any] = {
        "shape": shape.name,
        "write": write,
        "order": order.name,
        "decode": decode,
    }
    for name, fresh in (("us", False), ("fresh_metadata_us", True)):

        def steps(fresh: bool = fresh) -> None:
            for _ in range(STEPS):
                batch = upload(layers.host) if fresh else layers.batch
                layers.store.submit(layers.chain(batch, write))
            mx.synchronize()

        result[name] = round(_best(steps) / STEPS / CHAIN * 1e6, 2)
    result["host_build_us"] = round(_build_seconds(layers, write) / CHAIN * 1e6, 2)
    result["gb_per_s"] = round(shape.layer_bytes / result["us"] / 1e3)
    return result


def measure_cascade(shape: Shape) -> dict[str, Any]:
    """A layer without and with a cascade, of one column and of two, taking turns; and what planning
    a step costs the host.

    Small shapes take the host's time; the device's own is by torch's profiler.
    """
    ways = {
        "off": Layers(shape, cascade="off"),
        "on": Layers(shape, cascade="on"),
        "wide": Layers(shape, cascade="on", columns=2),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, layers in ways.items():

            def steps(layers: Layers = layers) -> None:
                for _ in range(STEPS):
                    layers.store.submit(layers.chain(layers.batch, write=False))
                mx.synchronize()

            seconds[name].append(_best(steps, 1))
    result: dict[str, Any] = {"shape": shape.name}
    for name, layers in ways.items():
        result[f"{name}_us"] = round(min(seconds[name]) / STEPS / CHAIN * 1e6, 2)
        busy = trace(lambda layers=layers: layers.store.submit(layers.chain(layers.batch, False)))
        if busy is not None:
            result[f"{name}_device_us"] = round(busy.seconds / CHAIN * 1e6, 2)
        start = time.perf_counter()
        for _ in range(10):
            layers.backend.plan_ahead(layers.batch)
        result[f"{name}_plan_us"] = round((time.perf_counter() - start) / 10 * 1e6, 1)
    for name in ("on", "wide"):
        result[f"{name}_times_faster"] = round(result["off_us"] / result[f"{name}_us"], 2)
        if f"{name}_device_us" in result:
            share = result["off_device_us"] / result[f"{name}_device_us"]
            result[f"{name}_times_faster_on_device"] = round(share, 2)
    return result


def _build_seconds(layers: Layers, write: bool) -> float:
    """Seconds in which Python puts a step together, without running it."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        output = layers.chain(layers.batch, write)
        times.append(time.perf_counter() - start)
        layers.store.commit(output)
    return median(times)


def measure_sdpa(shape: Shape, extra: int) -> dict[str, Any]:
    """MLX's own attention on contiguous K and V, chained the same way."""
    context = shape.contexts[0] + extra
    batch = len(shape.contexts)
    kv_shape = (batch, shape.num_kv_heads, context, shape.head_dim)
    layers = [(mx.full(kv_shape, 0.01, mx.bfloat16), _normal(kv_shape)) for _ in range(4)]
    queries = _normal((batch, shape.num_heads, 1, shape.head_dim))
    mx.eval(layers, queries)

    def steps() -> None:
        for _ in range(STEPS):
            output = queries
            for index in range(CHAIN):
                keys, values = layers[index % len(layers)]
                output = mx.fast.scaled_dot_product_attention(
                    output, keys, values, scale=shape.head_dim**-0.5
                )
            mx.async_eval(output)
        mx.synchronize()

    return {
        "shape": shape.name,
        "context": context,
        "us": round(_best(steps) / STEPS / CHAIN * 1e6, 2),
    }


def measure_batch_cache(shape: Shape) -> dict[str, Any]:
    """mlx-lm's BatchKVCache: update and attention, padded to the longest sequence."""
    from mlx_lm.models.base import scaled_dot_product_attention
    from mlx_lm.models.cache import BatchKVCache

    longest = max(shape.contexts)
    padding = [longest - context for context in shape.contexts]
    caches = [BatchKVCache(padding) for _ in range(4)]
    batch = len(shape.contexts)
    new = (batch, shape.num_kv_heads, 1, shape.head_dim)
    old = (batch, shape.num_kv_heads, longest - 1, shape.head_dim)
    filled = _normal(old)
    for cache in caches:
        cache.update_and_fetch(filled, filled)
        mx.eval(cache.keys, cache.values)
    keys, values, queries = (
        _normal(new),
        _normal(new),
        _normal((batch, shape.num_heads, 1, shape.head_dim)),
    )
    mx.eval(keys, values, queries)

    def steps() -> None:
        for _ in range(STEPS):
            output = queries
            for index in range(CHAIN):
                cache = caches[index % len(caches)]
                mask = cache.make_mask(1, return_array=True)
                k, v = cache.update_and_fetch(keys, values)
                output = scaled_dot_product_attention(
                    output, k, v, cache=cache, scale=shape.head_dim**-0.5, mask=mask
                )
            mx.async_eval(output)
        mx.synchronize()

    return {"shape": shape.name, "us": round(_best(steps, 3) / STEPS / CHAIN * 1e6, 2)}


def measure_prefill(rows: int, cached: int) -> dict[str, Any]:
    """A chunk over cached tokens: both paths, beside MLX's attention on contiguous K and V; and as
    in a model, with its rows written before, which spares a whole prompt the gather.
    """
    shape = Shape(f"{rows} rows over {cached}", (rows + cached,))
    length = CHAIN
    result: dict[str, Any] = {"shape": shape.name}
    for path, write in product(("gather", "kernel", "wide"), (False, True)):
        columns = 2 if path == "wide" else 1
        layers = Layers(
            shape,
            num_rows=rows,
            prefill="gather" if path == "gather" else "kernel",
            columns=columns,
        )

        def paged(layers: Layers = layers, write: bool = write) -> None:
            layers.store.submit(layers.chain(layers.batch, write, length))
            mx.synchronize()

        name = f"write_{path}_us" if write else f"{path}_us"
        result[name] = round(_best(paged) / length * 1e6, 1)

    kv_shape = (1, shape.num_kv_heads, rows + cached, shape.head_dim)
    keys, values = _normal(kv_shape), _normal(kv_shape)
    queries = _normal((1, shape.num_heads, rows, shape.head_dim))
    mx.eval(keys, values, queries)

    def contiguous() -> None:
        output = queries
        for _ in range(length):
            output = mx.fast.scaled_dot_product_attention(
                output, keys, values, scale=shape.head_dim**-0.5, mask="causal"
            )
        mx.eval(output)

    result["sdpa_us"] = round(_best(contiguous) / length * 1e6, 1)
    return result


def measure_write(num_rows: int) -> dict[str, Any]:
    """The write kernel alone, in a chain."""
    layers = Layers(Shape(f"{num_rows} rows", (64,) * num_rows))

    def steps() -> None:
        for _ in range(STEPS):
            for index in range(CHAIN):
                slots = layers.batch.groups[0].slot_mapping
                layers.store.write(index % layers.num_layers, layers.keys, layers.values, slots)
            layers.store.submit()
        mx.synchronize()

    return {"rows": num_rows, "us": round(_best(steps) / STEPS / CHAIN * 1e6, 2)}


def measure_rope(num_rows: int) -> dict[str, Any]:
    """RoPE of queries and keys and the write of K and V, all pieces of one product as in a model;
    in one launch, and one after the other.
    """
    layers = Layers(Shape(f"{num_rows} rows", (64,) * num_rows))
    shape, store = layers.shape, layers.store
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    ends = [shape.head_dim * sum(heads[:count]) for count in (1, 2, 3)]
    pieces = mx.split(_normal((num_rows, 1, ends[-1])), ends[:-1], axis=-1)
    queries, keys, values = (
        piece.reshape(num_rows, 1, count, shape.head_dim).transpose(0, 2, 1, 3)
        for piece, count in zip(pieces, heads, strict=True)
    )
    mx.eval(queries, keys, values)
    rope = Rope(shape.head_dim, False, 500000.0, 1.0)
    slots, positions = layers.batch.groups[0].slot_mapping, layers.batch.positions

    def together(layer: int) -> mx.array:
        return store.write_rotated(layer, NewRows(queries, keys, values, positions, slots), rope)

    def apart(layer: int) -> mx.array:
        rotated_queries, rotated_keys = (
            mx.fast.rope(
                rows,
                rope.dims,
                traditional=False,
                base=rope.base,
                scale=1.0,
                offset=positions[:num_rows],
            )
            for rows in (queries, keys)
        )
        store.write(layer, rotated_keys.squeeze(2), values.squeeze(2), slots)
        return rotated_queries

    result: dict[str, Any] = {"rows": num_rows}
    for name, work in (("together", together), ("apart", apart)):

        def step(work: Callable[[int], mx.array] = work) -> None:
            store.commit(*(work(index % layers.num_layers) for index in range(CHAIN)))

        result[f"{name}_us"] = round(_best(step) / CHAIN * 1e6, 2)
        busy = trace(step)
        if busy is not None:
            result[f"{name}_device_us"] = round(busy.seconds / CHAIN * 1e6, 2)
            result[f"{name}_launches"] = round(busy.launches / CHAIN, 1)
    return result


def measure_peak() -> dict[str, Any]:
    """Peak memory above what is held, over 1,000 pipelined steps of write and attention."""
    layers = Layers(Shape("8 x 4096", (4096,) * 8))
    layers.store.commit(layers.chain(layers.batch, write=True))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(1000):
        layers.store.submit(layers.chain(upload(layers.host), write=True, length=4))
    layers.store.commit()
    extra = mx.get_peak_memory() - before
    array_bytes = layers.shape.layer_bytes // 2
    return {
        "steps": 1000,
        "extra_bytes": extra,
        "pool_array_bytes": array_bytes,
        "ok": extra < array_bytes,
    }


def lay_out(spans: Sequence[tuple[int, int]], num_blocks: int, shared: int = 0) -> BatchArrays:
    """Sequences that compute tokens [start, start + count), with shuffled block tables; all begin
    with the same blocks of ``shared`` tokens.
    """
    counts = np.array([count for _, count in spans], np.int32)
    ends = np.array([start + count for start, count in spans], np.int32)
    widths = -(-ends // BLOCK_SIZE)
    ids = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    tables = np.full((len(spans), widths.max()), -1, np.int32)
    for row, at, width in zip(tables, np.cumsum(widths) - widths, widths, strict=True):
        row[:width] = ids[at : at + width]
    tables[:, : shared // BLOCK_SIZE] = tables[0, : shared // BLOCK_SIZE]
    positions = np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in spans])
    owners = np.repeat(np.arange(len(spans)), counts)
    blocks = tables[owners, positions // BLOCK_SIZE].astype(np.int64)
    group = GroupArrays(
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        block_tables=tables,
        copy_src=_EMPTY,
        copy_dst=_EMPTY,
    )
    query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return BatchArrays(
        sequences=(),
        num_decodes=int(np.count_nonzero(counts == 1)),
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        query_start_loc=query_start_loc,
        context_lens=ends,
        sample_rows=query_start_loc[1:] - 1,
        sample_sequences=(),
        unread_rows=_EMPTY,
        unread_sequences=(),
        groups=(group,),
    )


def _best(run: Callable[[], None], rounds: int = ROUNDS) -> float:
    """Seconds of the fastest of some rounds, after two that warm up."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def _normal(shape: tuple[int, ...]) -> mx.array:
    return mx.random.normal(shape).astype(mx.bfloat16)


def _platform() -> Any:
    platform = gpu_platform()
    assert platform is not None
    return platform


if __name__ == "__main__":
    sys.exit(main())
