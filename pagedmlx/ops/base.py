"""What every attention backend is given and must give: PagedBatch and AttentionBackend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.core.batch import NO_BLOCK, BatchArrays, GroupArrays, Int32Array
from pagedmlx.kv.store import KVStore
from pagedmlx.ops.launch import MIN_ELEMENTS


@dataclass(frozen=True, eq=False)
class GroupBatch:
    """A KV group's part of a batch, each array put on the device when it is first asked for.

    Attributes:
        host: The same on the host.
        num_padding: Rows that are padding.
    """

    host: GroupArrays
    num_padding: int = 0

    @cached_property
    def slot_mapping(self) -> mx.array:
        """(P,) int64; negative for padding."""
        return mx.array(_with_rows(self.host.slot_mapping, self.num_padding, NO_BLOCK))

    @cached_property
    def block_tables(self) -> mx.array:
        """(S, B) int32; the unused tail holds a valid block id and must be masked."""
        return mx.array(np.maximum(self.host.block_tables, 0))


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """A step for the device, shared by all layers; an array goes there when first asked for.

    P is T, the step's rows, or more: what is past them is padding that nobody looks at.

    Attributes:
        host: The same step on the host, for lengths and other control flow.
        num_padding: P - T.
        is_traced: Whether it is for a graph: its arrays may stand for others, with nothing in them.
    """

    host: BatchArrays
    num_padding: int = 0
    is_traced: bool = False

    @property
    def num_rows(self) -> int:
        """P."""
        return self.host.num_rows + self.num_padding

    @cached_property
    def token_ids(self) -> mx.array:
        """(P,) int32."""
        return mx.array(_with_rows(self.host.token_ids, self.num_padding))

    @cached_property
    def positions(self) -> mx.array:
        """(P or more,) int32, at least 8 elements, as kernels want them."""
        return mx.array(padded(_with_rows(self.host.positions, self.num_padding)))

    @cached_property
    def sample_rows(self) -> mx.array:
        """(R,) int32."""
        return mx.array(self.host.sample_rows)

    @cached_property
    def context_lens(self) -> mx.array:
        """(S,) int32."""
        return mx.array(self.host.context_lens)

    @cached_property
    def groups(self) -> tuple[GroupBatch, ...]:
        """One entry for each KV group."""
        return tuple(GroupBatch(group, self.num_padding) for group in self.host.groups)

    def given(
        self,
        *,
        token_ids: mx.array,
        positions: mx.array | None = None,
        sample_rows: mx.array | None = None,
        slot_mappings: Sequence[mx.array] = (),
    ) -> PagedBatch:
        """The same step with arrays that are on the device already.

        Args:
            token_ids: See above.
            positions: Likewise.
            sample_rows: Likewise.
            slot_mappings: One for each KV group, or none.
        """
        batch = PagedBatch(self.host, self.num_padding, self.is_traced)
        # What a cached property finds here it doesn't compute.
        vars(batch)["token_ids"] = token_ids
        if positions is not None:
            vars(batch)["positions"] = positions
        if sample_rows is not None:
            vars(batch)["sample_rows"] = sample_rows
        for group, slots in zip(batch.groups if slot_mappings else (), slot_mappings, strict=True):
            vars(group)["slot_mapping"] = slots
        return batch


def _with_rows(array: npt.NDArray[Any], count: int, value: int = 0) -> npt.NDArray[Any]:
    return np.pad(array, (0, count), constant_values=value) if count else array


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
