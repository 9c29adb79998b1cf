"""What this machine offers the engine, for ``pagedmlx doctor``; loads no model."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pagedmlx.models.blas import load_fast_blas

_NO_KERNELS = (
    "kernels that read K and V through the block tables: they need a GPU; attention gathers the "
    "blocks and calls MLX's own"
)
_KV_LATER = "int8 and int4 KV cache: not written yet"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found; the device's fields are None when MLX can't be loaded.

    Attributes:
        device: The device that MLX computes on.
        device_memory_bytes: What it may use in all.
        memory_bytes: Physical memory of the machine.
        max_buffer_bytes: Largest single array, where the device has such a limit.
        blas: One line about matrix products on the CPU.
        attention: The backend that ``auto`` takes.
        unsupported: What doesn't work here, each with its reason.
        problem: Why MLX can't be loaded, or None.
    """

    device: str | None
    device_memory_bytes: int | None
    memory_bytes: int
    max_buffer_bytes: int | None
    blas: str
    attention: str | None
    unsupported: tuple[str, ...]
    problem: str | None


def diagnose() -> Diagnosis:
    """Look at the machine; never raises for want of a device."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Before MLX is imported: it binds to the BLAS that is there at that moment.
    blas = load_fast_blas()
    try:
        import mlx.core as mx
    except ImportError as error:
        problem = f"MLX can't be loaded: {error}"
        missing = (_NO_KERNELS, _KV_LATER)
        return Diagnosis(None, None, memory_bytes, None, blas, None, missing, problem)
    from pagedmlx.engine.memory import device_memory_bytes
    from pagedmlx.ops import make_backend

    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    info = mx.device_info()
    max_buffer = info.get("max_buffer_length") if on_gpu else None
    missing = [_KV_LATER] if on_gpu else [_NO_KERNELS, _KV_LATER]
    if not mx.metal.is_available():
        missing.insert(0, "Metal: only on Macs with Apple silicon")
    return Diagnosis(
        device=_device_name(info, on_gpu=on_gpu),
        device_memory_bytes=device_memory_bytes(),
        memory_bytes=memory_bytes,
        max_buffer_bytes=int(max_buffer) if max_buffer else None,
        blas=blas,
        attention=make_backend("auto").name,
        unsupported=tuple(missing),
        problem=None,
    )


def _device_name(info: dict[str, str | int], *, on_gpu: bool) -> str:
    name = str(info.get("device_name") or info.get("architecture") or "")
    return " ".join(part for part in ("GPU" if on_gpu else "CPU", name) if part)
