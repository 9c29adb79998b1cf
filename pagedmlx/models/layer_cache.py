"""The cache objects that an mlx-lm model sees, one for each layer and step, in token rows.

They own nothing: K and V go into the store, attention goes to the backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import mlx.core as mx

from pagedmlx.kv.store import KVStore
from pagedmlx.ops.base import AttentionBackend, AttentionParams, PagedBatch


class RowLayout(StrEnum):
    """How the tokens of a step are laid out for the model.

    TOKEN_ROWS: every token is a row of its own, (T, 1), with its own position.
    SEQUENCE_ROWS: decode as (B, 1), each prefill chunk as (1, L); for models that carry a state
    from token to token or read gathered K and V.
    """

    TOKEN_ROWS = "token rows"
    SEQUENCE_ROWS = "sequence rows"


@dataclass(frozen=True, slots=True)
class GroupRows:
    """What the layers of one KV group share within a step.

    Attributes:
        store: Owner of the pool.
        backend: Attends.
        batch: The step.
        group: Index of the KV group.
        window: Tokens that a query sees, itself included; None is all.
    """

    store: KVStore
    backend: AttentionBackend
    batch: PagedBatch
    group: int
    window: int | None


class TokenRowCache:
    """One layer's cache for one step: T rows of one token each.

    Has what mlx-lm's models ask of a cache, and no attribute ``bits`` (mlx-lm would take it for
    a quantised cache).

    Args:
        layer: Index of the layer cache.
        rows: What the layer's KV group shares.

    Attributes:
        offset: (T,) int32; the rows' positions.
        attended: Whether the model has left its attention to the blocks.
    """

    def __init__(self, layer: int, rows: GroupRows) -> None:
        self.layer = layer
        self.rows = rows
        self.offset = rows.batch.positions
        self.attended = False
        self._fetched: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the step's K and V.

        Args:
            keys: (T, num_kv_heads, 1, k_head_dim).
            values: (T, num_kv_heads, 1, v_head_dim).

        Returns:
            The same arrays, which stand for each row's whole context: to be passed on to the
            attention function as they are. A gather for every row would cost far too much.
        """
        rows = self.rows
        slots = rows.batch.groups[rows.group].slot_mapping
        rows.store.write(self.layer, keys.squeeze(2), values.squeeze(2), slots)
        self._fetched = (keys, values)
        return self._fetched

    def attend_blocks(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attend through the block tables.

        Args:
            queries: (T, num_heads, 1, k_head_dim).
            keys: What the model passes on; only the very arrays of ``update_and_fetch`` stand for
                the blocks.
            values: Likewise.
            scale: Factor on q.k.
            sinks: (num_heads,) or None.

        Returns:
            (T, num_heads, 1, v_head_dim), or None when ``keys`` and ``values`` are others.
        """
        if self._fetched is None or keys is not self._fetched[0] or values is not self._fetched[1]:
            return None
        self.attended = True
        rows = self.rows
        output = rows.backend.attend(
            queries.squeeze(2),
            self.layer,
            rows.group,
            rows.store,
            rows.batch,
            AttentionParams(scale=scale, window=rows.window, sinks=sinks),
        )
        return output[:, :, None, :]

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """A mask that masks nothing: the blocks know causality and window.

        Args:
            num_tokens: Tokens in a row, which is 1 in this layout.
            return_array: The model insists on an array.
            window_size: The model's window; checked against the cache's when it was surveyed.

        Returns:
            None, or (T, 1, 1, 1) bool.
        """
        return mx.ones((self.offset.size, 1, 1, 1), mx.bool_) if return_array else None
