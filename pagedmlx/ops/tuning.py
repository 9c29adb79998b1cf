"""Readies a backend for a model: compiles what it may choose, and measures what it should.

What it costs to attend shared tokens once, a launch more and longer merges, and what it saves,
reading the same blocks for each sequence, depend on the GPU, on the host and on the model. So steps
are timed in both ways, once, when a model is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from pagedmlx.core.batch import batch_of
from pagedmlx.errors import KernelError, first_line
from pagedmlx.ops.base import PagedBatch
from pagedmlx.ops.decode import Decode
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Platform
from pagedmlx.ops.prefill import prefill_variant
from pagedmlx.ops.prefill_path import PrefillPath
from pagedmlx.ops.split_prefill import SplitPrefill
from pagedmlx.ops.trial import TrialLayer
from pagedmlx.ops.variants import MAX_ROWS, DecodeVariant

SHAPES = ((16, 8192), (16, 4096), (16, 2048), (8, 2048), (8, 1024), (4, 1024))
"""Sequences and the tokens that they share, which spare ever fewer."""

MIN_GAIN = 1.25
"""How much faster steps are at least: in serving the host has more to do than here."""

_MEASURING_S = 2.0
"""Nobody wants to wait longer for a model than this for what no one may come to use."""

MAX_DIFFERENCE = 0.1
"""Of two ways to attend the same rows, as a share of the largest element: far above what rounding
explains, and far below what a wrong one gives."""

_READ_FOR_EACH = "shared beginnings: read for each sequence"

MIN_CHUNK = 512
"""Shorter chunks leave a GPU idle that is so fast that plans matter."""

PLANNED_TOKENS = 16_384
"""Up to here chunks of whole prompts find a plan; each takes about 0.1 s on an H200."""


def compile_kernels(backend: KernelBackend) -> Iterator[float]:
    """Compile every kernel that decoding may take; on CUDA each takes seconds the first time.

    Args:
        backend: Has attended already, so that it knows the model's layers.

    Yields:
        The share that is done.

    Raises:
        KernelError: One of them can't be compiled.
    """
    works = backend.idle_works()
    for done, (base, work) in enumerate(works, 1):
        _run_idle(backend, base, work)
        yield done / len(works)


def tune(
    backend: KernelBackend,
    chunk: int,
    max_len: int,
    shapes: Sequence[tuple[int, int]],
    gain: Callable[[int, int], float],
) -> list[str]:
    """Have a backend attend shared tokens once where that is faster on this device, and right.

    Args:
        backend: Has attended already, so that it knows the model's layers.
        chunk: Tokens that a step computes of a prompt which nobody else delays.
        max_len: Longest sequence.
        shapes: Those of ``SHAPES`` that may come.
        gain: How many times faster a step is so, with as many sequences and shared tokens.

    Returns:
        Lines for the user; none where nothing was to be chosen.
    """
    kinds = [kind for kind in backend.kinds if prefill_variant(kind).is_supported]
    if not kinds:
        return []
    try:
        for kind in kinds:
            for work in (*backend.idle_cascades(kind), *backend.idle_split_prefills(kind)):
                _run_idle(backend, kind, work)
            _compare_prefills(backend, kind)
            _plan_chunks(backend, kind, chunk, min(max_len, PLANNED_TOKENS))
    except (KernelError, RuntimeError) as error:  # the latter is MLX's, of memory too
        backend.avoid_runs()
        return [f"{_READ_FOR_EACH}: {first_line(error)}"]
    if not shapes:
        return []
    try:
        threshold = find_threshold(shapes, gain)
    except (KernelError, RuntimeError) as error:
        return [f"{_READ_FOR_EACH}: {first_line(error)}"]
    if threshold is None:
        return [f"{_READ_FOR_EACH}, which is as fast here"]
    for kind in kinds:
        backend.set_cascade_threshold(kind, threshold)
    return [f"shared beginnings: read once for all sequences if that spares {threshold} tokens"]


def find_threshold(
    shapes: Iterable[tuple[int, int]], gain: Callable[[int, int], float]
) -> int | None:
    """Find the fewest spared tokens from which on a cascade is faster, as far as there is time.

    Args:
        shapes: Sequences and shared tokens to try, those that spare most first.
        gain: As for ``tune``; the fewer are spared, the less it is.

    Returns:
        Tokens that sequences need not read; None if it never was faster.
    """
    threshold = None
    end = time.monotonic() + _MEASURING_S
    for count, shared in shapes:
        if time.monotonic() > end or gain(count, shared) < MIN_GAIN:
            break
        threshold = shared * (count - 1)
    return threshold


def _run_idle(backend: KernelBackend, base: DecodeVariant, work: Decode | SplitPrefill) -> None:
    """Launch the kernels of a plan with nothing to do, which compiles them."""
    num_rows = MAX_ROWS
    num_blocks = -(-num_rows // base.pool.block_size)
    TrialLayer(backend.launcher, base, num_blocks, num_rows).run(work, writes=backend.has_written)


def _compare_prefills(backend: KernelBackend, base: DecodeVariant) -> None:
    """Attend a short chunk in every way that may be chosen later; each is compiled by that.

    Raises:
        KernelError: One of them can't be compiled, or they differ.
    """
    ways = {PrefillPath.KERNEL, PrefillPath.SPLIT}
    if backend.launcher.platform is Platform.CUDA:
        ways.add(PrefillPath.GATHER)
    num_rows = 2 * MAX_ROWS
    num_blocks = -(-num_rows // base.pool.block_size) + 1
    tables = np.arange(num_blocks, dtype=np.int32)[None]
    end = num_blocks * base.pool.block_size
    layer = TrialLayer(backend.launcher, base, num_blocks, num_rows)
    layer.write(0)
    batch = PagedBatch(batch_of([(end - num_rows, num_rows)], [tables], base.pool.block_size))
    found = [
        layer.attend(KernelBackend(backend.launcher, backend.wave, prefill=way), batch, 1)
        for way in sorted(ways)
    ]
    expected = found[0]
    for output in found[1:]:
        difference = np.abs(output - expected).max() / np.abs(expected).max()
        if not difference <= MAX_DIFFERENCE:
            raise KernelError(f"two ways to attend a prompt differ by {difference:.2g}")


def _plan_chunks(backend: KernelBackend, base: DecodeVariant, chunk: int, max_len: int) -> None:
    """Have MLX plan the attention of a long prompt's chunks, where it needs plans.

    A chunk is as long as it may be, or half or a quarter beside other sequences of the step.
    """
    block_size = base.pool.block_size
    if not backend.can_plan_chunks(base):
        return
    longest = backend.chunk_multiple(chunk)
    lengths = {longest // part for part in (1, 2, 4) if longest >= part * MIN_CHUNK}
    gather = KernelBackend(backend.launcher, backend.wave, prefill=PrefillPath.GATHER)
    for length in sorted(lengths):
        for num_tokens in range(length, max_len + 1, length):
            tables = np.arange(num_tokens // block_size, dtype=np.int32)[None]
            layer = TrialLayer(backend.launcher, base, tables.size, length)
            batch = PagedBatch(batch_of([(num_tokens - length, length)], [tables], block_size))
            layer.attend(gather, batch, 1, from_pool=True)
            backend.note_chunk_plan(base, length, num_tokens)
