"""Changes the length of a pool's arrays, and frees what they took before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

# MLX has one cache for the process, and engines may resize their pools on their own threads.
_LOCK = threading.Lock()


def with_length(array: mx.array, length: int, fill: float) -> mx.array:
    """A copy of an array with another length, or the array itself if it has that already.

    Args:
        array: Of any shape; evaluated.
        length: Of the first axis.
        fill: Value of what is new.

    Returns:
        Evaluated, so that the array is free once nobody else has it.

    Raises:
        RuntimeError: The device has no memory for it.
    """
    num_kept = array.shape[0]
    if length == num_kept:
        return array
    if length > num_kept:
        # To join it with what is new would allocate that twice.
        changed = mx.full((length, *array.shape[1:]), fill, array.dtype)
        changed[:num_kept] = array
    else:
        # A slice would keep the whole array.
        changed = mx.take(array, mx.arange(length), axis=0)
    mx.eval(changed)
    mx.synchronize()
    return changed


@contextmanager
def freed_at_once() -> Iterator[None]:
    """What is freed within is not kept for arrays of its size, of which there will be none.

    What MLX keeps already stays: the next step's arrays would else have to be allocated anew.
    """
    with _LOCK:
        limit = mx.set_cache_limit(mx.get_cache_memory())
        try:
            yield
        finally:
            mx.set_cache_limit(limit)
