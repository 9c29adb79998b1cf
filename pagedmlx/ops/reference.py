"""The oracle: attention over blocks in plain float32 maths, one sequence at a time."""

from __future__ import annotations

import mlx.core as mx

from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import AttentionParams, PagedBatch


class ReferenceBackend:
    """Attends as the definition says; slow, and what the other backends are compared with."""

    name = "reference"
    takes_padding = False

    def attend(
        self,
        queries: mx.array,
        layer: int,
        group: int,
        store: KVStore,
        batch: PagedBatch,
        params: AttentionParams,
    ) -> mx.array:
        """See ``AttentionBackend.attend``."""
        starts = batch.host.query_start_loc
        outputs: list[mx.array] = []
        for index in range(len(starts) - 1):
            rows = slice(int(starts[index]), int(starts[index + 1]))
            keys, values = store.gather(layer, batch.groups[group].block_tables[index : index + 1])
            mask = visible(batch.positions[rows], mx.arange(keys.shape[2]), params.window)
            # A masked NaN would still reach the output: its weight is 0, and 0 * NaN is NaN.
            live = mask.any(axis=0)[:, None]
            output = explicit_attention(
                queries[rows].swapaxes(0, 1)[None],
                mx.where(live, keys, 0),
                mx.where(live, values, 0),
                mask,
                params,
            )
            outputs.append(output[0].swapaxes(0, 1))
        return mx.concatenate(outputs)

    def rest(self) -> None:
        """See ``AttentionBackend.rest``; nothing is kept."""


def visible(query_positions: mx.array, key_positions: mx.array, window: int | None) -> mx.array:
    """Which keys each query sees: those at or before it, and within the window if there is one.

    Args:
        query_positions: (L,) positions within the sequence.
        key_positions: (N,) likewise.
        window: Tokens that a query sees, itself included; None is all.

    Returns:
        (L, N) booleans.
    """
    distance = query_positions[:, None] - key_positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def explicit_attention(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, params: AttentionParams
) -> mx.array:
    """Softmax attention written out, computed in float32.

    Args:
        queries: (S, num_heads, L, k_head_dim).
        keys: (S, num_kv_heads, N, k_head_dim); ``num_heads`` is a multiple of ``num_kv_heads``.
        values: (S, num_kv_heads, N, v_head_dim).
        mask: Booleans that broadcast to (S, 1, L, N); every query sees at least one key.
        params: Scale, softcap and sinks; the window is in ``mask`` already.

    Returns:
        (S, num_heads, L, v_head_dim) in the type of ``queries``.
    """
    num_seqs, num_heads, num_rows, _ = queries.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    # Query heads h * factor .. (h + 1) * factor - 1 share KV head h.
    grouped = queries.astype(mx.float32).reshape(
        num_seqs, num_kv_heads, num_heads // num_kv_heads, num_rows, -1
    )
    scores = grouped @ keys.astype(mx.float32)[:, :, None].swapaxes(-1, -2) * params.scale
    scores = scores.reshape(num_seqs, num_heads, num_rows, num_keys)
    if params.softcap is not None:
        scores = params.softcap * mx.tanh(scores / params.softcap)
    scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
    if params.sinks is not None:
        sinks = params.sinks.astype(mx.float32).reshape(1, num_heads, 1, 1)
        sinks = mx.broadcast_to(sinks, (num_seqs, num_heads, num_rows, 1))
        scores = mx.concatenate([scores, sinks], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., :num_keys]
    weights = weights.reshape(num_seqs, num_kv_heads, -1, num_rows, num_keys)
    output = weights @ values.astype(mx.float32)[:, :, None]
    return output.reshape(num_seqs, num_heads, num_rows, -1).astype(queries.dtype)
