"""Changes the length of a pool's arrays, and frees what they took before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import mlx.core as mx

# MLX has one cache for the process, and engines may resize their pools on their own threads.
_LOCK = threading.Lock()


def set_length(
    arrays: list[mx.array], length: int, fill: float, *, most_bytes: int, spare_bytes: int
) -> None:
    """Put copies of another length in the place of arrays, and free the old ones.

    To wait for each array by itself takes longer than to copy it, so as many are copied together
    as memory allows; where there is less of it than was said, one by one.

    Args:
        arrays: Of any shapes; nothing else may hold them, or they stay in memory.
        length: Of their first axis.
        fill: Value of what is new.
        most_bytes: What all of them may take meanwhile, short and long ones together.
        spare_bytes: What they may take in any case above the longer of both lengths. One array is
            copied even if that takes more.

    Raises:
        RuntimeError: The device has no memory for it. Some arrays may have their new length; all
            keep what was in them.
    """
    longer = sum(_bytes_at(each, max(each.shape[0], length)) for each in arrays)
    spare_bytes = max(most_bytes - longer, spare_bytes)
    with _freed_at_once():
        first = 0
        while first < len(arrays):
            end = first + _num_within(spare_bytes, arrays[first:], length)
            try:
                arrays[first:end] = _copies(arrays[first:end], length, fill)
            except RuntimeError:
                if end == first + 1:
                    raise
                spare_bytes = 0
                continue
            first = end


def _copies(arrays: list[mx.array], length: int, fill: float) -> list[mx.array]:
    changed = [with_length(array, length, fill) for array in arrays]
    try:
        mx.eval(changed)
    finally:
        mx.synchronize()
    return changed


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
    shorter = (_bytes_at(each, min(each.shape[0], length)) for each in arrays)
    return max(1, sum(total <= spare_bytes for total in accumulate(shorter)))


def _bytes_at(array: mx.array, length: int) -> int:
    return array.nbytes // array.shape[0] * length


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
