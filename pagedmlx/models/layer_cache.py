"""The cache objects that an mlx-lm model sees in place of its own, one for each layer and call.

They own nothing: K and V go into the store, attention goes to the backend.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import NewRows, Rope
from pagedmlx.models.deferred_rope import DeferredRopes, not_rotated
from pagedmlx.models.flat_rows import FlatRows
from pagedmlx.models.hand_over import HandOver
from pagedmlx.models.parts import Part
from pagedmlx.models.survey import stand_ins
from pagedmlx.ops.base import AttentionBackend, AttentionParams
from pagedmlx.ops.context import Context, find_context


class GroupRows:
    """What the layers of one KV group share within a call of the model.

    Args:
        store: Owner of the pool.
        backend: Attends.
        part: The rows of the call.
        group: Index of the KV group.
        window: Tokens that a query sees, itself included; None is all.
        ropes: Know of queries and keys that are not rotated yet.
        hand_over: Gives the device what there is of the step.
    """

    def __init__(
        self,
        store: KVStore,
        backend: AttentionBackend,
        part: Part,
        group: int,
        window: int | None,
        ropes: DeferredRopes,
        hand_over: HandOver,
    ) -> None:
        self.store = store
        self.backend = backend
        self.part = part
        self.group = group
        self.window = window
        self.ropes = ropes
        self._hand_over = hand_over
        self._hands_over = store.updates_in_place and not part.gathers and not part.batch.is_traced
        self._contexts: dict[int | None, Context] = {}
        self._no_mask: mx.array | None = None

    def context(self, mask_window: int | None = None) -> Context:
        """Where to find what the rows see, planned when first asked for."""
        if mask_window == self.window:
            mask_window = None
        if mask_window not in self._contexts:
            self._contexts[mask_window] = find_context(
                self.part.batch.host,
                self.group,
                self.window,
                self.store.layout.block_size,
                mask_window,
                self.part.mask_ndim,
            )
        return self._contexts[mask_window]

    def hand_over(self, output: mx.array) -> None:
        """Let the device begin with the first layers while others wait for the host.

        Not where the model is given K and V to read: all of those would be kept until the call
        ends.

        Args:
            output: What a layer's attention has come to.
        """
        if self._hands_over:
            self._hand_over.layer(self.part.batch.num_rows, output)

    def no_mask(self) -> mx.array:
        """(S, 1, 1, 1) bool that masks nothing, for models that insist on an array."""
        if self._no_mask is None:
            self._no_mask = mx.ones((self.part.num_sequences, 1, 1, 1), mx.bool_)
        return self._no_mask


class LayerCache:
    """One layer's cache for one call of the model: S sequences with L rows each.

    Has what mlx-lm's models ask of a cache, and no attribute ``bits`` (mlx-lm would take it for
    a quantised cache).

    Args:
        layer: Index of the layer cache.
        rows: What the layer's KV group shares.

    Attributes:
        attended: Whether the model has left its attention to the blocks.
        keys: What ``update_and_fetch`` has returned; some models look here.
        values: Likewise.
    """

    def __init__(self, layer: int, rows: GroupRows) -> None:
        self.layer = layer
        self.rows = rows
        self.attended = False
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._fetched: tuple[mx.array, mx.array] | None = None
        self._unrotated: tuple[Rope, mx.array, mx.array] | None = None

    @property
    def offset(self) -> Any:
        """Tokens before the rows, and after the update those too: (S,) int32, or a number."""
        part = self.rows.part
        return part.offset if self._fetched is None else part.offset + part.length

    @property
    def start_position(self) -> int:
        """Position of the first token that is kept: what a cache in chunks says of itself."""
        offset, window = self.rows.part.offset, self.rows.window
        if not isinstance(offset, int):
            raise TypeError("a cache in chunks has one position for all rows")
        return 0 if window is None else max(offset - window + 1, 0)

    def maybe_trim_front(self) -> None:
        """Do nothing: what is kept follows from the position."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the rows' K and V; keys that aren't rotated yet are written when queries come.

        Args:
            keys: (S, num_kv_heads, L, k_head_dim).
            values: (S, num_kv_heads, L, v_head_dim).

        Returns:
            Arrays that stand for each row's whole context: to be passed on to the attention
            function as they are. They are not the rows' own, which would be kept until the call
            ends. For a model that reads them itself, K (S, num_kv_heads, N, k_head_dim) and V
            likewise of all tokens that a row sees.
        """
        rows = self.rows
        slots = rows.part.batch.groups[rows.group].slot_mapping
        v_head_dim = values.shape[3]
        rope = rows.ropes.take(keys)
        if rope is not None:
            self._unrotated = rope, keys, values
        else:
            # Kernels take rows of one type.
            stored = values.astype(keys.dtype) if v_head_dim else keys
            rows.store.write(self.layer, _by_row(keys), _by_row(stored), slots)
        if not rows.part.gathers:
            self._fetched = stand_ins(keys, values)
        else:
            found = rows.store.gather_slots(self.layer, rows.context().slots)
            self._fetched = found[0].astype(keys.dtype), found[1].astype(values.dtype)
            if not v_head_dim:
                self._fetched = self._fetched[0], found[1][..., :0]
        self.keys, self.values = self._fetched
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What ``update_and_fetch`` has returned, for layers that share this one's K and V."""
        assert self._fetched is not None, "a layer shares K and V that are not there yet"
        return self._fetched

    def attend_blocks(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attend through the block tables.

        Args:
            queries: (S, num_heads, L, k_head_dim).
            keys: What the model passes on; only the very arrays of ``update_and_fetch`` stand for
                the blocks.
            values: Likewise.
            scale: Factor on q.k.
            mask: None or what ``make_mask`` gave, else the model wants something that blocks
                don't know.
            sinks: (num_heads,) or None.

        Returns:
            (S, num_heads, L, v_head_dim), or None when this is not for the blocks.
        """
        if self._fetched is None or keys is not self._fetched[0] or values is not self._fetched[1]:
            return None
        rows = self.rows
        if not self._leaves_masking_to_blocks(mask):
            return None
        self.attended = True
        if self._unrotated is None:
            by_row = _by_row(queries)
        else:
            by_row = self._rotate_and_write(queries, *self._unrotated)
        output = rows.backend.attend(
            by_row,
            self.layer,
            rows.group,
            rows.store,
            rows.part.batch,
            AttentionParams(scale=scale, window=rows.window, sinks=sinks),
        )
        rows.hand_over(output)
        num_rows, num_heads, head_dim = output.shape
        if rows.part.length == 1:
            return FlatRows(output.reshape(num_rows, -1), (num_rows, num_heads, 1, head_dim))
        return output.reshape(-1, rows.part.length, num_heads, head_dim).swapaxes(1, 2)

    def _rotate_and_write(
        self, queries: mx.array, rope: Rope, keys: mx.array, values: mx.array
    ) -> mx.array:
        """Write K and V, K rotated, and return the rotated queries by row."""
        self._unrotated = None
        if rope is not self.rows.ropes.take(queries):
            raise not_rotated()
        batch = self.rows.part.batch
        slots = batch.groups[self.rows.group].slot_mapping
        rows = NewRows(queries, keys, values, batch.positions, slots)
        return self.rows.store.write_rotated(self.layer, rows, rope)

    def _leaves_masking_to_blocks(self, mask: Any) -> bool:
        # Any other array says something that only the model knows.
        rows = self.rows
        ours = rows.context().mask if rows.part.gathers else rows.no_mask()
        return mask is None or mask is ours

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """What each row sees of the arrays that ``update_and_fetch`` returns.

        Args:
            num_tokens: L.
            return_array: The model insists on an array.
            window_size: The model's window; where blocks do the masking it was compared with the
                cache's when the model was surveyed.

        Returns:
            For a model that reads K and V itself as in ``Context``; else, as blocks know causality
            and window, None or (S, 1, 1, 1) bool.
        """
        if self.rows.part.gathers:
            return self.rows.context(window_size).mask
        return self.rows.no_mask() if return_array else None


def _by_row(array: mx.array) -> mx.array:
    """(S, heads, L, D) as (S * L, heads, D)."""
    num_sequences, num_heads, length, head_dim = array.shape
    if length == 1:
        return array.reshape(num_sequences, num_heads, head_dim)
    return array.swapaxes(1, 2).reshape(-1, num_heads, head_dim)
