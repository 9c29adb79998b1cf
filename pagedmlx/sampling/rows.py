"""How some rows of a batch are taken out and put back, and how host numbers reach the device."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt


def take_rows(array: mx.array, rows: list[int]) -> mx.array:
    """The given rows of an array, in rising order; the array itself if these are all."""
    if len(rows) == array.shape[0]:
        return array
    return array[mx.array(rows, dtype=mx.int32)]


def put_rows(array: mx.array, rows: list[int], values: mx.array) -> mx.array:
    """The array with other values in the given rows, which are in rising order."""
    if len(rows) == array.shape[0]:
        return values
    array = mx.array(array)
    array[mx.array(rows, dtype=mx.int32)] = values
    return array


def upload_together(*arrays: npt.ArrayLike) -> list[mx.array]:
    """One-dimensional numbers on the device, floats as float32 and others as int32.

    They travel as one array: what is new on a device costs per array.
    """
    hosts = [np.asarray(array) for array in arrays]
    floats = [host.dtype.kind == "f" for host in hosts]
    parts = [
        host.astype(np.float32).view(np.int32) if is_float else host.astype(np.int32)
        for host, is_float in zip(hosts, floats, strict=True)
    ]
    ends = np.cumsum([part.size for part in parts])[:-1].tolist()
    packed = mx.split(mx.array(np.concatenate(parts)), ends)
    return [
        part.view(mx.float32) if is_float else part
        for part, is_float in zip(packed, floats, strict=True)
    ]
