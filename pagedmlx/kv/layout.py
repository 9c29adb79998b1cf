"""KVLayout: the shape of the pool's arrays and what they cost; no array is made here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pagedmlx.core.groups import KVGroup

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


class AxisOrder(StrEnum):
    """Order of the axes of a pool array."""

    HEAD_MAJOR = "block, head, slot, D"
    SLOT_MAJOR = "block, slot, head, D"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for one token.

    Attributes:
        num_kv_heads: K and V heads.
        k_head_dim: Elements of a K row.
        v_head_dim: Elements of a V row.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shapes and sizes of the pool.

    Attributes:
        block_size: Tokens in one block.
        dtype: Element type by name: float16, bfloat16 or float32.
        layers: One entry for each of the model's layers.
        groups: The KV groups; each layer with K and V is in exactly one, others in none.
        order: Order of the axes. Head-major lets a gather land in the order that attention
            reads; ``scripts/bench_layout.py`` measures both.
        state_bytes: Recurrent state of one sequence, over all layers that keep one.
    """

    block_size: int
    dtype: str
    layers: tuple[LayerShape, ...]
    groups: tuple[KVGroup, ...]
    order: AxisOrder = AxisOrder.HEAD_MAJOR
    state_bytes: int = 0

    def k_shape(self, layer: int, num_blocks: int) -> tuple[int, int, int, int]:
        """Shape of a layer's K array."""
        return self._shape(layer, num_blocks, self.layers[layer].k_head_dim)

    def v_shape(self, layer: int, num_blocks: int) -> tuple[int, int, int, int]:
        """Shape of a layer's V array."""
        return self._shape(layer, num_blocks, self.layers[layer].v_head_dim)

    def token_bytes(self, group: int) -> int:
        """Bytes of K and V for one token over all layers of a group."""
        return sum(self.layer_bytes(layer) for layer in self.groups[group].layers)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of K and V for one token in one layer."""
        shape = self.layers[layer]
        return shape.num_kv_heads * (shape.k_head_dim + shape.v_head_dim) * DTYPE_BYTES[self.dtype]

    def block_bytes(self, group: int) -> int:
        """Bytes of one block over all layers of a group."""
        return self.token_bytes(group) * self.block_size

    def _shape(self, layer: int, num_blocks: int, head_dim: int) -> tuple[int, int, int, int]:
        num_heads = self.layers[layer].num_kv_heads
        if self.order is AxisOrder.HEAD_MAJOR:
            return (num_blocks, num_heads, self.block_size, head_dim)
        return (num_blocks, self.block_size, num_heads, head_dim)
