"""Which decode variants go by matrices, and what they take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedmlx.ops.launch import MAX_THREADGROUP_BYTES, Platform
from pagedmlx.ops.variants import (
    BLOCK_SIZES,
    HEAD_DIMS,
    MAX_MATRIX_HEAD_DIM,
    DecodePath,
    DecodeVariant,
    PoolShape,
    decode_by,
)


def variant(
    factor: int = 8, head_dim: int = 128, block_size: int = 16, dtype: str = "bfloat16", **more: int
) -> DecodeVariant:
    return DecodeVariant(PoolShape(dtype, 2, head_dim, head_dim, block_size), dtype, factor, **more)


def test_matrices_are_taken_where_they_are_known_to_be_faster_or_forced() -> None:
    for platform in Platform:
        assert decode_by(DecodePath.LANES, variant(), platform) == variant()
        assert decode_by(DecodePath.MATRICES, variant(), platform).matrices
        assert decode_by(DecodePath.AUTO, variant(factor=12), platform) == variant(factor=12)
        by_itself = decode_by(DecodePath.AUTO, variant(factor=16), platform)
        assert by_itself.matrices == (platform is Platform.CUDA)


@pytest.mark.parametrize("head_dim", [d for d in HEAD_DIMS if d <= MAX_MATRIX_HEAD_DIM])
@pytest.mark.parametrize("factor", [5, 8, 16, 40])
def test_what_matrices_serve_fits_in_threadgroup_memory(head_dim: int, factor: int) -> None:
    forced = decode_by(DecodePath.MATRICES, variant(factor, head_dim), Platform.METAL)
    assert forced.matrices
    assert forced.vectors >= factor
    assert forced.vectors % 8 == 0
    assert 0 < forced.kernel.threadgroup_bytes <= MAX_THREADGROUP_BYTES


@pytest.mark.parametrize(
    "other",
    [
        variant(factor=4),
        variant(head_dim=72),
        variant(head_dim=512),
        variant(dtype="float32"),
        replace(variant(), dtype="float16"),
        *(variant(block_size=size) for size in BLOCK_SIZES if size < 8),
    ],
    ids=str,
)
def test_what_matrices_lack_goes_by_lanes_also_where_they_are_forced(other: DecodeVariant) -> None:
    assert decode_by(DecodePath.MATRICES, other, Platform.METAL) == other


def test_rows_fill_matrices_as_query_heads_do() -> None:
    assert not decode_by(DecodePath.MATRICES, variant(factor=2, rows=2), Platform.METAL).matrices
    assert decode_by(DecodePath.MATRICES, variant(factor=2, rows=4), Platform.METAL).matrices
