"""Language models on a Mac with a KV cache paged like memory; this file owns the public names.

They are loaded on first use, so ``import pagedmlx`` alone loads no MLX and is instant.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedmlx.config import EngineConfig
    from pagedmlx.core.sampling_params import SamplingParams
    from pagedmlx.core.structured import StructuredOutputs
    from pagedmlx.engine.async_engine import AsyncEngine
    from pagedmlx.engine.outputs import RequestOutput
    from pagedmlx.llm import LLM

__version__ = "0.1.0.dev0"

# MLX on CUDA keeps some hundred graphs and attention plans, and raises an error in mid-step when
# over its whole life twice as many have come. A server meets ever new shapes, and is to go on. MLX
# looks here when it first uses the GPU.
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")

__all__ = [
    "LLM",
    "AsyncEngine",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> object:
    match name:
        case "LLM":
            module = "pagedmlx.llm"
        case "AsyncEngine":
            module = "pagedmlx.engine.async_engine"
        case "EngineConfig":
            module = "pagedmlx.config"
        case "RequestOutput":
            module = "pagedmlx.engine.outputs"
        case "SamplingParams":
            module = "pagedmlx.core.sampling_params"
        case "StructuredOutputs":
            module = "pagedmlx.core.structured"
        case _:
            raise AttributeError(f"module 'pagedmlx' has no attribute {name!r}")
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        if "libmlx" in str(error):
            error.add_note(
                "On Linux MLX needs a backend: install pagedmlx[cpu], [cuda12] or [cuda13]."
            )
        raise


def __dir__() -> list[str]:
    return __all__
