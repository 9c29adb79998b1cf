"""Changes the length of a pool's arrays, and frees what they took before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import mlx.core as mx

# MLX has one cache for the process, and engines may resize their pools on their own threads.
_LOCK = threading.Lock()


def set_length(arrays: list[mx.array], length: int, fill: float, spare_bytes: int) -> None:
    """Put copies of another length in the place of arrays, and free the old ones.

    To wait for each array by itself takes longer than to copy it, so as many are copied together
    as the spare memory allows.

    Args:
        arrays: Of any shapes; nothing else may hold them, or they stay in memory.
        length: Of their first axis.
        fill: Value of what is new.
        spare_bytes: Most bytes to take meanwhile above what the arrays take before or after. One
            array is copied even if that takes more.

    Raises:
        RuntimeError: The device has no memory for it. Some arrays may have their new length; all
            keep what was in them.
    """
    with _freed_at_once():
        first = 0
        while first < len(arrays):
            end = first + _num_within(spare_bytes, arrays[first:], length)
            changed = [with_length(array, length, fill) for array in arrays[first:end]]
            mx.eval(changed)
            mx.synchronize()
            arrays[first:end] = changed
            del changed
            first = end


def with_length(array: mx.array, length: int, fill: float) -> mx.array:
    """A copy of an array with another length, or the array itself if it has that already.

    Args:
        array: Of any shape.
        length: Of the first axis.
        fill: Value of what is new.
    """
    num_kept = array.shape[0]
    if length == num_kept:
        return array
    if length > num_kept:
        # To join it with what is new would allocate that twice.
        changed = mx.full((length, *array.shape[1:]), fill, array.dtype)
        changed[:num_kept] = array
        return changed
    # A slice would keep the whole array.
    return mx.take(array, mx.arange(length), axis=0)


def _num_within(spare_bytes: int, arrays: list[mx.array], length: int) -> int:
    """How many of the first arrays may be there twice, long and short; at least one."""
    shorter = (each.nbytes // each.shape[0] * min(each.shape[0], length) for each in arrays)
    return max(1, sum(total <= spare_bytes for total in accumulate(shorter)))


@contextmanager
def _freed_at_once() -> Iterator[None]:
    """What is freed within is not kept for arrays of its size, of which there will be none.

    What MLX keeps already stays: the next step's arrays would else have to be allocated anew.
    """
    with _LOCK:
        limit = mx.set_cache_limit(mx.get_cache_memory())
        try:
            yield
        finally:
            mx.set_cache_limit(limit)
