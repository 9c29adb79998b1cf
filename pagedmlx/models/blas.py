"""Puts a fast BLAS in front of MLX's own on CPU-only Linux; imports no MLX.

MLX's Linux wheel brings the reference BLAS, whose matrix product is some 25 times slower.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

# Both export the plain cblas names that MLX calls; scipy-openblas32 renames them.
_CANDIDATES = (
    ("OpenBLAS", "libopenblas.so.0"),
    ("MKL", "libmkl_rt.so.3"),
    ("MKL", "libmkl_rt.so.2"),
)


def load_fast_blas() -> str:
    """Load OpenBLAS or MKL with global symbols, so that MLX binds to it when it is imported.

