"""How fast the kernels are on this GPU, beside MLX's own attention and mlx-lm's caches.

python scripts/bench_kernels.py --json FILE [--only decode,prefill,..] [--peak]    (- is stdout)
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx

from pagedmlx.engine.memory import device_memory_bytes
from pagedmlx.kv.layout import AxisOrder
from pagedmlx.kv.writer import NewRows, Rope
from pagedmlx.models.compiled import CompiledSteps
from pagedmlx.models.hand_over import HandOver
from pagedmlx.models.layer_spans import LayerSpans
from pagedmlx.ops.base import PagedBatch
from pagedmlx.ops.launch import MLXLauncher, gpu_platform
from pagedmlx.ops.most_likely import MostLikely
from pagedmlx.ops.variants import DecodePath
from pagedmlx.sampling.greedy import most_likely
from scripts.kernel_layers import CHAIN, ROUNDS, STEPS, Layers, Shape, best, measure_ceiling, normal
from scripts.report import add_json_option, note, save, save_so_far
from scripts.trace import trace

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

NUM_LOGITS = 128256


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the kernels.")
    add_json_option(parser)
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
        "sampling": lambda: [measure_sampling(rows) for rows in (1, 16, 64)],
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
        note(f"{name} ({seconds:.0f} s): {result[name]}")
        save_so_far(result, options.json)
    save(result, options.json)
    failed = any(isinstance(part, dict) and "error" in part for part in result.values())
    return 1 if failed or not result.get("peak", {"ok": True}).get("ok") else 0


def _each(
    shapes: Sequence[Shape], measure: Callable[[Shape], dict[str, Any]], padded: bool = False
) -> list[dict[str, Any]]:
    """Measure the shapes for which the machine's memory is large enough."""
    rows = []
    for shape in shapes:
        if not _fits(shape, padded):
            reason = "it takes more than a quarter of the memory"
            rows.append({"shape": shape.name, "left_out": reason})
            continue
        # MLX decodes by cuDNN only if K and V fill their memory, and that of others may be larger.
        gc.collect()
        mx.clear_cache()
        rows.append(measure(shape))
    return rows


def _fits(shape: Shape, padded: bool) -> bool:
    """Whether four layers, the least that is ever made, leave room for all else."""
    tokens = max(shape.contexts) * len(shape.contexts) if padded else sum(shape.contexts)
    return 4 * tokens * shape.token_bytes <= device_memory_bytes() // 4


def measure_decode(
    shape: Shape,
    write: bool = False,
    order: AxisOrder = AxisOrder.HEAD_MAJOR,
    decode: str = "auto",
) -> dict[str, Any]:
    """Microseconds of a layer, pipelined: in steps that are compiled, as most in serving are, and
    in steps that Python builds; with the metadata resident, and fresh as at each step in serving.
    """
    layers = Layers(shape, order, decode=decode)
    result: dict[str, Any] = {
        "shape": shape.name,
        "write": write,
        "order": order.name,
        "decode": decode,
    }
    store = layers.store
    compiled = CompiledSteps(
        lambda batch, _: layers.chain(batch, write),
        layers.backend,
        store,
        LayerSpans([]),
        HandOver(),
    )

    @mx.compile
    def traced(token: mx.array) -> tuple[mx.array, mx.array]:
        kept = store.token
        store.wrote(token)
        output, token = layers.chain(layers.batch, write), store.token
        store.wrote(kept)
        return output, token

    def replay() -> mx.array:
        output, token = traced(store.token)
        store.wrote(token)
        return output

    def replay_fresh() -> mx.array:
        batch = PagedBatch(layers.host)
        output = compiled(batch)
        return layers.chain(batch, write) if output is None else output

    store.commit(layers.chain(layers.batch, write))  # compiles the kernels, makes the plan
    ways: dict[str, Callable[[], mx.array]] = {
        "us": replay,
        "fresh_us": replay_fresh,
        "built_us": lambda: layers.chain(layers.batch, write),
        "built_fresh_us": lambda: layers.chain(PagedBatch(layers.host), write),
    }
    for name, step in ways.items():

        def steps(step: Callable[[], mx.array] = step) -> None:
            for _ in range(STEPS):
                store.submit(step())
            mx.synchronize()

        result[name] = round(best(steps) / STEPS / CHAIN * 1e6, 2)
    compiled.drop()
    result["host_build_us"] = round(_build_seconds(layers, write) / CHAIN * 1e6, 2)
    result["gb_per_s"] = round(shape.layer_bytes / result["us"] / 1e3)
    return result


def measure_cascade(shape: Shape) -> dict[str, Any]:
    """A layer without and with a cascade, as the platform has it and with one column of query
    vectors, taking turns; and what planning a step costs the host.

    Small shapes take the host's time; the device's own is by torch's profiler.
    """
    ways = {
        "off": Layers(shape, cascade="off"),
        "on": Layers(shape, cascade="on"),
        "narrow": Layers(shape, cascade="on", columns=1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, layers in ways.items():

            def steps(layers: Layers = layers) -> None:
                for _ in range(STEPS):
                    layers.store.submit(layers.chain(layers.batch, write=False))
                mx.synchronize()

            seconds[name].append(best(steps, 1))
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
    for name in ("on", "narrow"):
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
    """MLX's own attention on contiguous K and V, chained the same ways."""
    context = shape.contexts[0] + extra
    batch = len(shape.contexts)
    kv_shape = (batch, shape.num_kv_heads, context, shape.head_dim)
    layers = [(mx.full(kv_shape, 0.01, mx.bfloat16), normal(kv_shape)) for _ in range(4)]
    queries = normal((batch, shape.num_heads, 1, shape.head_dim))
    mx.eval(layers, queries)

    def chain(output: mx.array) -> mx.array:
        for index in range(CHAIN):
            keys, values = layers[index % len(layers)]
            output = mx.fast.scaled_dot_product_attention(
                output, keys, values, scale=shape.head_dim**-0.5
            )
        return output

    result: dict[str, Any] = {"shape": shape.name, "context": context}
    # Compiled first, MLX no longer takes K and V for arrays that it may hand to cuDNN.
    for name, step in (("built_us", chain), ("us", mx.compile(chain))):

        def steps(step: Callable[[mx.array], mx.array] = step) -> None:
            for _ in range(STEPS):
                mx.async_eval(step(queries))
            mx.synchronize()

        result[name] = round(best(steps) / STEPS / CHAIN * 1e6, 2)
    return result


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
    filled = normal(old)
    for cache in caches:
        cache.update_and_fetch(filled, filled)
        mx.eval(cache.keys, cache.values)
    keys, values, queries = (
        normal(new),
        normal(new),
        normal((batch, shape.num_heads, 1, shape.head_dim)),
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

    return {"shape": shape.name, "us": round(best(steps, 3) / STEPS / CHAIN * 1e6, 2)}


def measure_prefill(rows: int, cached: int) -> dict[str, Any]:
    """A chunk over cached tokens: both paths, beside MLX's attention on contiguous K and V; and as
    in a model, with its rows written before, which spares a whole prompt the gather.
    """
    shape = Shape(f"{rows} rows over {cached}", (rows + cached,))
    result: dict[str, Any] = {"shape": shape.name}
    for path, write in product(("gather", "kernel", "narrow"), (False, True)):
        layers = Layers(
            shape,
            num_rows=rows,
            prefill="gather" if path == "gather" else "kernel",
            columns=1 if path == "narrow" else None,
        )

        def paged(layers: Layers = layers, write: bool = write) -> None:
            for _ in range(STEPS):
                layers.store.submit(layers.chain(layers.batch, write))
            mx.synchronize()

        name = f"write_{path}_us" if write else f"{path}_us"
        result[name] = round(best(paged) / STEPS / CHAIN * 1e6, 1)

    kv_shape = (1, shape.num_kv_heads, rows + cached, shape.head_dim)
    keys, values = normal(kv_shape), normal(kv_shape)
    queries = normal((1, shape.num_heads, rows, shape.head_dim))
    mx.eval(keys, values, queries)

    def contiguous() -> None:
        for _ in range(STEPS):
            output = queries
            for _ in range(CHAIN):
                output = mx.fast.scaled_dot_product_attention(
                    output, keys, values, scale=shape.head_dim**-0.5, mask="causal"
                )
            mx.async_eval(output)
        mx.synchronize()

    result["sdpa_us"] = round(best(contiguous) / STEPS / CHAIN * 1e6, 1)
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

    return {"rows": num_rows, "us": round(best(steps) / STEPS / CHAIN * 1e6, 2)}


def measure_rope(num_rows: int) -> dict[str, Any]:
    """RoPE of queries and keys and the write of K and V, all pieces of one product as in a model;
    in one launch, and one after the other.
    """
    layers = Layers(Shape(f"{num_rows} rows", (64,) * num_rows))
    shape, store = layers.shape, layers.store
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    ends = [shape.head_dim * sum(heads[:count]) for count in (1, 2, 3)]
    pieces = mx.split(normal((num_rows, 1, ends[-1])), ends[:-1], axis=-1)
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
        rotated_queries, rotated_keys = (rope.rotate(rows, positions) for rows in (queries, keys))
        store.write(layer, rotated_keys, values.squeeze(2), slots)
        return rotated_queries

    result: dict[str, Any] = {"rows": num_rows}
    for name, work in (("together", together), ("apart", apart)):

        def step(work: Callable[[int], mx.array] = work) -> None:
            store.commit(*(work(index % layers.num_layers) for index in range(CHAIN)))

        result.update(_times(name, step))
    return result


def measure_sampling(num_rows: int) -> dict[str, Any]:
    """The most likely tokens of bfloat16 logits, by the kernel and by MLX.

    Each choice is among logits that wait for the one before, as in a model; ``first`` takes any
    token, and so has what that costs by itself.
    """
    platform = gpu_platform()
    assert platform is not None
    logits = normal((num_rows, NUM_LOGITS))
    mx.eval(logits)
    ways: dict[str, Callable[[mx.array], mx.array]] = {
        "first": lambda logits: logits[:, 0].astype(mx.int32),
        "kernel": MostLikely(MLXLauncher(platform)),
        "mlx": most_likely,
    }
    result: dict[str, Any] = {"rows": num_rows}
    for name, find in ways.items():

        def step(find: Callable[[mx.array], mx.array] = find) -> None:
            tokens = find(logits)
            for _ in range(CHAIN - 1):
                tokens = find(_after(logits, tokens))
            mx.eval(tokens)

        result.update(_times(name, step))
    return result


def _times(name: str, step: Callable[[], None]) -> dict[str, float]:
    """What one call of a chain takes, and the device with it."""
    found = {f"{name}_us": round(best(step) / CHAIN * 1e6, 2)}
    busy = trace(step)
    if busy is not None:
        found[f"{name}_device_us"] = round(busy.seconds / CHAIN * 1e6, 2)
        found[f"{name}_launches"] = round(busy.launches / CHAIN, 1)
    return found


@mx.compile
def _after(logits: mx.array, tokens: mx.array) -> mx.array:
    """The same logits, once there are the tokens."""
    return logits + (0 * tokens[:, None]).astype(logits.dtype)


def measure_peak() -> dict[str, Any]:
    """Peak memory above what is held, over 1,000 pipelined steps of write and attention."""
    layers = Layers(Shape("8 x 4096", (4096,) * 8))
    layers.store.commit(layers.chain(layers.batch, write=True))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(1000):
        layers.store.submit(layers.chain(PagedBatch(layers.host), write=True, length=4))
    layers.store.commit()
    extra = mx.get_peak_memory() - before
    array_bytes = layers.shape.layer_bytes // 2
    return {
        "steps": 1000,
        "extra_bytes": extra,
        "pool_array_bytes": array_bytes,
        "ok": extra < array_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
