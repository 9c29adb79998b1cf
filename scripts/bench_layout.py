"""Which axis order of the pool is faster here: writes, gathers and attention, both in one run.

python scripts/bench_layout.py --json FILE    (- is stdout)
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.models.blas import load_fast_blas

BLAS = load_fast_blas()

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import NO_BLOCK, BatchArrays, GroupArrays
from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.kv.layout import AxisOrder, KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import AttentionParams, PagedBatch
from pagedmlx.ops.gather import GatherBackend
from scripts.report import add_json_option, save

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Heads:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Case:
    """Sequences that compute tokens [start, start + count)."""

    name: str
    spans: tuple[tuple[int, int], ...]


HEADS = (Heads("smollm2-135m", 9, 3, 64), Heads("llama-3.2-1b", 32, 8, 64))
CASES = (
    Case("decode 1 x 1024", ((1023, 1),)),
    Case("decode 8 x 512", ((511, 1),) * 8),
    Case("decode 32 x 120", ((119, 1),) * 32),
    Case("decode 2048 + 7 x 250", ((2047, 1), *((249, 1),) * 7)),
    Case("prefill 256 at 0", ((0, 256),)),
    Case("prefill 64 at 960", ((960, 64),)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the axis orders of the pool.")
    add_json_option(parser)
    parser.add_argument("--rounds", type=int, default=15, help="timings of each operation")
    parser.add_argument("--dtype", default="float32", help="type of the pool's elements")
    options = parser.parse_args()

    rows = []
    for heads in HEADS:
        for case in CASES:
            row = measure(heads, case, options.dtype, options.rounds)
            rows.append(row)
            ratios = "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratio"].items())
            print(f"{heads.name:13} {case.name:22} slot/head: {ratios}", file=sys.stderr)
    result = {
        "block_size": BLOCK_SIZE,
        "dtype": options.dtype,
        "device": str(mx.default_device()),
        "blas": BLAS,
        "ratio": "time of slot-major over time of head-major; above 1, head-major is faster",
        "mean_ratio": {
            name: round(geometric_mean(row["ratio"][name] for row in rows), 3)
            for name in rows[0]["ratio"]
        },
        "cases": rows,
    }
    print(f"mean: {result['mean_ratio']}", file=sys.stderr)
    save(result, options.json)


def measure(heads: Heads, case: Case, dtype: str, rounds: int) -> dict:
    """Median microseconds of each operation in both orders, taken in turn."""
    host = make_batch(case.spans)
    orders = (AxisOrder.HEAD_MAJOR, AxisOrder.SLOT_MAJOR)
    operations = {order: make_operations(heads, host, dtype, order) for order in orders}
    times: dict[AxisOrder, dict[str, list[float]]] = {
        order: {name: [] for name in operations[order]} for order in orders
    }
    for round_number in range(rounds + 2):
        for order in orders if round_number % 2 else reversed(orders):
            for name, operation in operations[order].items():
                start = time.perf_counter()
                operation()
                if round_number >= 2:
                    times[order][name].append(time.perf_counter() - start)
    medians = {
        order: {name: median(values) * 1e6 for name, values in times[order].items()}
        for order in orders
    }
    head_major, slot_major = (medians[order] for order in orders)
    return {
        "heads": asdict(heads),
        "case": case.name,
        "microseconds": {
            order.name.lower(): {name: round(value, 1) for name, value in medians[order].items()}
            for order in orders
        },
        "ratio": {name: round(slot_major[name] / head_major[name], 3) for name in head_major},
    }


def make_operations(
    heads: Heads, host: BatchArrays, dtype: str, order: AxisOrder
) -> dict[str, Callable[[], None]]:
    """What one layer does in a step: each alone, then all of it as a step would."""
    num_blocks = int(host.groups[0].block_tables.max()) + 1
    layout = KVLayout(
        block_size=BLOCK_SIZE,
        dtype=dtype,
        layers=(LayerShape(heads.num_kv_heads, heads.head_dim, heads.head_dim),),
        groups=(KVGroup(KVGroupKind.FULL, (0,)),),
        order=order,
    )
    store = KVStore(layout, (num_blocks,))
    batch, backend = PagedBatch(host), GatherBackend()
    params = AttentionParams(scale=heads.head_dim**-0.5)
    element = getattr(mx, dtype)
    queries = mx.random.normal((host.num_rows, heads.num_heads, heads.head_dim)).astype(element)
    rows = mx.random.normal((host.num_rows, heads.num_kv_heads, heads.head_dim)).astype(element)
    mx.eval(queries, rows)

    def write() -> None:
        store.write(0, rows, rows, batch.groups[0].slot_mapping)
        store.commit()

    def gather() -> None:
        store.commit(*store.gather(0, batch.groups[0].block_tables))

    def attend() -> None:
        store.commit(backend.attend(queries, 0, 0, store, batch, params))

    def step() -> None:
        store.write(0, rows, rows, batch.groups[0].slot_mapping)
        attend()

    return {"write": write, "gather": gather, "attend": attend, "step": step}


def make_batch(spans: tuple[tuple[int, int], ...]) -> BatchArrays:
    """Sequences over shuffled blocks, single rows first."""
    rng = np.random.default_rng(0)
    counts = np.array([count for _, count in spans], dtype=np.int32)
    ends = np.array([start + count for start, count in spans], dtype=np.int32)
    widths = -(-ends // BLOCK_SIZE)
    tables = np.full((len(spans), widths.max()), NO_BLOCK, dtype=np.int32)
    tables[np.arange(widths.max()) < widths[:, None]] = rng.permutation(widths.sum())
    positions = np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in spans])
    owners = np.repeat(np.arange(len(spans)), counts)
    blocks = tables[owners, positions // BLOCK_SIZE].astype(np.int64)
    none = np.empty(0, dtype=np.int32)
    return BatchArrays(
        sequences=(),
        num_decodes=int(np.count_nonzero(counts == 1)),
        token_ids=np.zeros(len(positions), dtype=np.int32),
        positions=positions,
        query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context_lens=ends,
        sample_rows=none,
        sample_sequences=(),
        groups=(GroupArrays(blocks * BLOCK_SIZE + positions % BLOCK_SIZE, tables, none, none),),
    )


if __name__ == "__main__":
    main()
