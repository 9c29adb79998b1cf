"""What every attention backend is given and must give: PagedBatch and AttentionBackend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import NO_BLOCK, BatchArrays, Int32Array
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.launch import MIN_ELEMENTS


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """A KV group's part of a batch on the device; shapes as in ``GroupArrays``.

    Attributes:
        slot_mapping: (P,) int64; negative for padding.
        block_tables: (S, B) int32; the unused tail holds a valid block id and must be masked.
    """

    slot_mapping: mx.array
    block_tables: mx.array


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A step on the device, uploaded once and shared by all layers.

    P is T, the step's rows, or more: what is past them is padding that nobody looks at.

    Attributes:
        host: The same step on the host, for lengths and other control flow.
        token_ids: (P,) int32.
        positions: (P or more,) int32, at least 8 elements, as kernels want them.
        context_lens: (S,) int32.
        groups: One entry for each KV group.
    """

    host: BatchArrays
    token_ids: mx.array
    positions: mx.array
    context_lens: mx.array
    groups: tuple[GroupBatch, ...]

    @property
    def num_rows(self) -> int:
        """P."""
        return self.token_ids.shape[0]


def upload(host: BatchArrays, num_rows: int | None = None) -> PagedBatch:
    """Put a step's arrays on the device; the tables' unused tail becomes a valid block id.

    Args:
        host: The step.
        num_rows: P, where there is padding.
    """
    padding = (0, 0 if num_rows is None else num_rows - host.num_rows)
    return PagedBatch(
        host=host,
        token_ids=mx.array(np.pad(host.token_ids, padding)),
        positions=mx.array(padded(np.pad(host.positions, padding))),
        context_lens=mx.array(host.context_lens),
        groups=tuple(
            GroupBatch(
                slot_mapping=mx.array(
                    np.pad(group.slot_mapping, padding, constant_values=NO_BLOCK)
                ),
                block_tables=mx.array(
                    np.where(group.block_tables == NO_BLOCK, 0, group.block_tables)
                ),
            )
            for group in host.groups
        ),
    )


def padded(array: Int32Array) -> Int32Array:
    """The same with at least 8 elements; MLX declares smaller arrays differently to kernels."""
    missing = max(0, MIN_ELEMENTS - array.size)
    return np.pad(array, (0, missing)) if missing else array


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What differs between attention layers.

    Attributes:
        scale: Factor on q.k.
        window: A query at position p sees positions (p - window, p]; None is all of [0, p].
        sinks: (num_heads,) extra logits that take part in the softmax only; or None.
        softcap: Scores become softcap * tanh(score / softcap); None is off.
    """

    scale: float
    window: int | None = None
    sinks: mx.array | None = None
    softcap: float | None = None


class AttentionBackend(Protocol):
    """Attends the rows of a step to the blocks of their sequences.

    Attributes:
        name: What the user calls it.
        takes_padding: Whether batches may have any, whose output is then zeros.
    """

    name: str
    takes_padding: bool

    def attend(
        self,
        queries: mx.array,
        layer: int,
        group: int,
        store: KVStore,
        batch: PagedBatch,
        params: AttentionParams,
    ) -> mx.array:
        """Causal attention of every row to its own sequence, through the block tables.

        Args:
            queries: (P, num_heads, k_head_dim).
            layer: The layer whose K and V are read; the step's rows are already written.
            group: The layer's KV group.
            store: Owner of the pool.
            batch: The step.
            params: The layer's settings.

        Returns:
            (P, num_heads, v_head_dim), in the type of ``queries``.
        """
        ...

    def rest(self) -> None:
        """Nothing runs: forget the last step, and give back the memory that it took."""
        ...
