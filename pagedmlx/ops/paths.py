"""Which attention backends this device can use, and how the pool is written for each."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from pagedmlx.errors import InvalidRequestError
from pagedmlx.kv.writer import FunctionalWriter, PoolWriter
from pagedmlx.ops.base import AttentionBackend
from pagedmlx.ops.device import threadgroups_at_once
from pagedmlx.ops.gather import GatherBackend
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import MLXLauncher, gpu_platform
from pagedmlx.ops.reference import ReferenceBackend


@dataclass(frozen=True, slots=True)
class AttentionPath:
    """A way to write K and V and to attend to them.

    Attributes:
        backend: Attends.
        writer: Writes.
    """

    backend: AttentionBackend
    writer: PoolWriter


def attention_paths(name: str) -> tuple[AttentionPath, ...]:
    """The ways that a setting allows on this device, in the order in which to try them.

    Kernels write in place, so that steps can follow each other without a wait. Whatever goes wrong
    with them, the functional update and MLX's own attention are there to fall back on.

    Args:
        name: As in ``EngineConfig.attention_backend``.

    Raises:
        InvalidRequestError: There is no such backend, or not on this device.
    """
    gathers = _gathers()
    match name:
        case "gather":
            return gathers
        case "reference":
            return (AttentionPath(ReferenceBackend(), FunctionalWriter()),)
        case "kernels" | "auto":
            kernels = _kernels()
        case _:
            raise InvalidRequestError(
                "attention_backend", f"{name!r} must be auto, kernels, gather or reference"
            )
    if name == "auto":
        return gathers if kernels is None else (kernels, *gathers)
    if kernels is None:
        raise InvalidRequestError(
            "attention_backend",
            "kernels need a GPU, and MLX computes on the CPU here",
            hint="leave it at auto",
        )
    return (kernels,)


def _gathers() -> tuple[AttentionPath, ...]:
    """By MLX's own attention; on a CPU at first with rotations that layers share."""
    plain = AttentionPath(GatherBackend(), FunctionalWriter())
    if mx.default_device() != mx.Device(mx.cpu):
        return (plain,)
    return AttentionPath(GatherBackend(), FunctionalWriter(shares_rotations=True)), plain


def _kernels() -> AttentionPath | None:
    platform = gpu_platform()
    if platform is None:
        return None
    launcher = MLXLauncher(platform)
    wave = threadgroups_at_once(platform, str(mx.device_info().get("device_name")))
    return AttentionPath(KernelBackend(launcher, wave), InPlaceWriter(launcher))
