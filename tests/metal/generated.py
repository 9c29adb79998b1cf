"""The exact source that MLX would hand to Metal, on a machine that has no Metal.

Calling a Metal kernel raises there, except while `mx.export_function` traces: then the call is
recorded, and with `verbose` MLX prints the source that it made, signature included.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

_PRINTED = re.compile(r"^Generated source code for `(.*?)`:\n```\n(.*?)\n```$", re.M | re.DOTALL)


def generated_sources(call: Callable[[], Any]) -> list[str]:
    """Sources of the Metal kernels that `call` calls with `verbose=True`, in order.

    Args:
        call: Calls kernels made by `mx.fast.metal_kernel`, and returns an array or several, all
            of which are traced and none evaluated.
    """

    def traced(_: mx.array) -> Any:
        return call()

    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        sys.stdout.flush()
        saved = os.dup(1)
        try:
            with printed.open("wb") as target:
                os.dup2(target.fileno(), 1)
            mx.export_function(str(Path(folder) / "traced"), traced, mx.array(0.0))
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        return [source for _, source in _PRINTED.findall(printed.read_text())]


def generated_source(call: Callable[[], Any]) -> str:
    """Source of the one Metal kernel that `call` calls with `verbose=True`."""
    (source,) = generated_sources(call)
    return source
