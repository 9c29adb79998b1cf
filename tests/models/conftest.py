"""Puts a fast BLAS in front of MLX's before any test of this folder imports mlx."""

from __future__ import annotations

from pagedmlx.models.blas import load_fast_blas

load_fast_blas()
