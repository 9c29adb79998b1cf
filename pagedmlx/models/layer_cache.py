"""The cache objects that an mlx-lm model sees, one for each layer and step, in token rows.

They own nothing: K and V go into the store, attention goes to the backend.
"""

from __future__ import annotations

from enum import StrEnum

import mlx.core as mx
import numpy as np

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


class GroupRows:
    """What the layers of one KV group share within a step; made lazily, so free when unused.

    Args:
        store: Owner of the pool.
        backend: Attends.
        batch: The step.
        group: Index of the KV group.
        window: Tokens that a query sees, itself included; None is all.
    """

    def __init__(
        self,
        store: KVStore,
        backend: AttentionBackend,
        batch: PagedBatch,
        group: int,
        window: int | None,
    ) -> None:
        self.store = store
        self.backend = backend
        self.batch = batch
        self.group = group
        self.window = window
        self._tables: mx.array | None = None
        self._live: mx.array | None = None

    @property
    def tables(self) -> mx.array:
        """(T, B) int32; each row's block table."""
        if self._tables is None:
            counts = np.diff(self.batch.host.query_start_loc)
            owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
            self._tables = self.batch.groups[self.group].block_tables[mx.array(owners)]
        return self._tables

    @property
    def live(self) -> mx.array:
        """(T, B * block_size) bool; the slots that each row may see, in the order of its table."""
        if self._live is None:
            slots = mx.arange(self.tables.shape[1] * self.store.layout.block_size)[None]
            positions = self.batch.positions[:, None]
            self._live = slots <= positions
            if self.window is not None:
                self._live = self._live & (slots > positions - self.window)
        return self._live


class TokenRowCache:
    """One layer's cache for one step: T rows of one token each.

    Has what mlx-lm's models ask of a cache, and no attribute ``bits`` (mlx-lm would take it for
    a quantised cache).

    Args:
        layer: Index of the layer cache.
        rows: What the layer's KV group shares.
    """

    def __init__(self, layer: int, rows: GroupRows) -> None:
        self.layer = layer
        self.rows = rows
        self.offset = rows.batch.positions
        self._fetched: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the step's K and V, and promise each row's context.

        Args:
            keys: (T, num_kv_heads, 1, k_head_dim).
            values: (T, num_kv_heads, 1, v_head_dim).

        Returns:
            Lazy K (T, num_kv_heads, B * block_size, k_head_dim) and V likewise, zero outside the
            slots that a row may see: gathered only if the model does its own attention.
        """
        rows = self.rows
        slots = rows.batch.groups[rows.group].slot_mapping
        rows.store.write(self.layer, keys.squeeze(2), values.squeeze(2), slots)
        gathered_keys, gathered_values = rows.store.gather(self.layer, rows.tables)
        live = rows.live[:, None, :, None]
        # A masked NaN in V would still poison a softmax-weighted sum, so dead slots become zero.
        self._fetched = (
            mx.where(live, gathered_keys, mx.zeros_like(gathered_keys)),
            mx.where(live, gathered_values, mx.zeros_like(gathered_values)),
        )
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
        """The mask for a model that does its own attention; the blocks need none.

        Args:
            num_tokens: Tokens in a row, which is 1 in this layout.
            return_array: The model insists on an array.
            window_size: The model's window; checked against the cache's when it was surveyed.

        Returns:
            None, or (T, 1, 1, B * block_size) bool.
        """
        return self.rows.live[:, None, None, :] if return_array else None
