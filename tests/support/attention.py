"""A case of paged attention and its answer in float64 numpy, which knows nothing of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import BatchArrays
from pagedmlx.core.groups import KVGroup, KVGroupKind
from pagedmlx.kv.layout import AxisOrder, KVLayout, LayerShape
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import PoolWriter
from pagedmlx.ops.base import AttentionBackend, AttentionParams, PagedBatch
from pagedmlx.ops.kernels import KernelBackend
from tests.support.batches import make_batch, slots_of

# Rounding of the inputs, of the weights and of the output; each is a few units in the last place.
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Case:
    """One layer, a batch, and the dense K and V of every sequence."""

    store: KVStore
    batch: PagedBatch
    queries: mx.array
    keys: list[np.ndarray]
    values: list[np.ndarray]
    dtype: str

    def attend(self, backend: AttentionBackend, params: AttentionParams) -> np.ndarray:
        output = backend.attend(self.queries, 0, 0, self.store, self.batch, params)
        assert output.dtype == self.queries.dtype
        return to_numpy(output)

    def expected(self, params: AttentionParams) -> np.ndarray:
        return dense_attention(
            to_numpy(self.queries), self.keys, self.values, self.batch.host, params
        )

    def check(self, backend: AttentionBackend, params: AttentionParams) -> None:
        tolerance = TOLERANCES[self.dtype]
        np.testing.assert_allclose(
            self.attend(backend, params), self.expected(params), rtol=tolerance, atol=tolerance
        )


def make_case(
    spans: Sequence[tuple[int, int]],
    *,
    block_size: int = 16,
    num_kv_heads: int = 2,
    factor: int = 1,
    k_head_dim: int = 8,
    v_head_dim: int = 8,
    dtype: str = "float32",
    fill: float = float("nan"),
    order: AxisOrder = AxisOrder.HEAD_MAJOR,
    seed: int = 0,
    writer: PoolWriter | None = None,
) -> Case:
    """Fill a pool whose dead slots hold ``fill``; the last write is the step's own rows."""
    rng = np.random.default_rng(seed)
    num_blocks = sum(-(-(start + count) // block_size) for start, count in spans) + 3
    host = make_batch(spans, block_size=block_size, num_blocks=num_blocks, rng=rng)
    layout = KVLayout(
        block_size=block_size,
        dtype=dtype,
        layers=(LayerShape(num_kv_heads, k_head_dim, v_head_dim),),
        groups=(KVGroup(KVGroupKind.FULL, (0,)),),
        order=order,
    )
    store = KVStore(layout, (num_blocks,), fill, writer)
    store.check(0, host.groups[0])
    mlx_dtype = getattr(mx, dtype)
    keys, values = [], []
    for sequence, (start, _) in enumerate(spans):
        context_len = int(host.context_lens[sequence])
        k = _random(rng, (context_len, num_kv_heads, k_head_dim), mlx_dtype)
        v = _random(rng, (context_len, num_kv_heads, v_head_dim), mlx_dtype)
        slots = mx.array(slots_of(host, 0, sequence, block_size))
        if start:
            store.write(0, k[:start], v[:start], slots[:start])
        store.write(0, k[start:], v[start:], slots[start:])
        keys.append(to_numpy(k))
        values.append(to_numpy(v))
    store.commit()
    queries = _random(rng, (host.num_rows, num_kv_heads * factor, k_head_dim), mlx_dtype)
    return Case(store, PagedBatch(host), queries, keys, values, dtype)


def planned_ahead(
    case: Case, backend: KernelBackend, params: AttentionParams, num_padding: int
) -> Case:
    """The same step, planned as if it were compiled; the queries of its padding are NaN."""
    case.attend(backend, params)  # shows it the layers
    batch = PagedBatch(case.batch.host, num_padding)
    plans = backend.plan_ahead(batch)
    assert plans is not None, "it can't be planned ahead"
    backend.follow(batch, plans, list(map(mx.array, plans.arrays)))
    nothing = mx.full((num_padding, *case.queries.shape[1:]), mx.nan, case.queries.dtype)
    return replace(case, batch=batch, queries=mx.concatenate([case.queries, nothing]))


def write_step(case: Case, dtype: mx.Dtype | None = None) -> None:
    """Write the step's rows once more, as a model does: all at once, at the batch's slots."""
    counts = np.diff(case.batch.host.query_start_loc)

    def newest(arrays: list[np.ndarray]) -> mx.array:
        rows = [a[len(a) - n :] for a, n in zip(arrays, counts, strict=True)]
        padding = np.zeros((case.batch.num_padding, *arrays[0].shape[1:]))
        return mx.array(np.concatenate([*rows, padding])).astype(dtype or case.queries.dtype)

    slots = case.batch.groups[0].slot_mapping
    case.store.write(0, newest(case.keys), newest(case.values), slots)


def dense_attention(
    queries: np.ndarray,
    keys: list[np.ndarray],
    values: list[np.ndarray],
    host: BatchArrays,
    params: AttentionParams,
) -> np.ndarray:
    """Attention row by row and head by head, as a textbook writes it."""
    sinks = None if params.sinks is None else to_numpy(params.sinks)
    num_rows, num_heads, _ = queries.shape
    output = np.empty((num_rows, num_heads, values[0].shape[-1]))
    for sequence, (k, v) in enumerate(zip(keys, values, strict=True)):
        factor = num_heads // k.shape[1]
        for row in range(host.query_start_loc[sequence], host.query_start_loc[sequence + 1]):
            position = int(host.positions[row])
            low = 0 if params.window is None else max(0, position + 1 - params.window)
            for head in range(num_heads):
                scores = k[low : position + 1, head // factor] @ queries[row, head] * params.scale
                if params.softcap is not None:
                    scores = params.softcap * np.tanh(scores / params.softcap)
                if sinks is not None:
                    scores = np.append(scores, sinks[head])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                seen = v[low : position + 1, head // factor]
                output[row, head] = weights[: len(seen)] @ seen
    return output


def with_fresh_batch(case: Case) -> Case:
    """The same case with its batch uploaded again, as the next step's would be."""
    return replace(case, batch=PagedBatch(case.batch.host))


def to_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
