"""Puts a fast BLAS in front of MLX's own on CPU-only Linux; imports no MLX.

MLX's Linux wheel brings the reference BLAS, whose matrix product is some 25 times slower.
"""

from __future__ import annotations

import ctypes
import os
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

    Call it before anything imports ``mlx.core``: MLX binds its symbols at that moment. Where MLX
    computes on a GPU it changes nothing that matters.

    Returns:
        One line that says which BLAS matrix products on the CPU will use.
    """
    if sys.platform != "linux":
        return "BLAS: the system's"
    if "mlx.core" in sys.modules:
        for name, library in _CANDIDATES:
            if _open(library, os.RTLD_NOLOAD):
                return f"BLAS: {name} ({library})"
        return "BLAS: left as it was, since mlx was imported first"
    # PyPI's mkl puts its libraries in the environment's own lib folder.
    folder = Path(sys.prefix) / "lib"
    for name, library in _CANDIDATES:
        for path in (library, str(folder / library)):
            if _open(path, ctypes.RTLD_GLOBAL):
                return f"BLAS: {name} ({library})"
    return (
        "BLAS: MLX's slow reference one; install libopenblas0-pthread (Debian, Ubuntu) "
        "or pip install mkl"
    )


def _open(library: str, mode: int) -> bool:
    try:
        ctypes.CDLL(library, mode=mode)
    except OSError:
        return False
    return True
