"""KVLayout: the shape of the pool's arrays and what they cost; no array is made here."""

from __future__ import annotations

from dataclasses import dataclass

from pagedmlx.core.groups import KVGroup

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


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
        groups: The KV groups; each layer with K and V is in exactly one.
    """

    block_size: int
    dtype: str
    layers: tuple[LayerShape, ...]
    groups: tuple[KVGroup, ...]

    def token_bytes(self, group: int) -> int:
        """Bytes of K and V for one token over all layers of a group."""
        elements = sum(
            shape.num_kv_heads * (shape.k_head_dim + shape.v_head_dim)
            for shape in (self.layers[layer] for layer in self.groups[group].layers)
        )
        return elements * DTYPE_BYTES[self.dtype]

    def block_bytes(self, group: int) -> int:
        """Bytes of one block over all layers of a group."""
        return self.token_bytes(group) * self.block_size
