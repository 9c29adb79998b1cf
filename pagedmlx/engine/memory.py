"""How many blocks the pool gets: from what the user asked and what the device has."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

from pagedmlx.config import EngineConfig
from pagedmlx.core.groups import Windows
from pagedmlx.engine.limits import MemoryLimits
from pagedmlx.errors import InvalidRequestError
from pagedmlx.kv.layout import KVLayout
from pagedmlx.kv.writer import PoolWriter
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.dummy_steps import make_pool, run_chunk

KEPT_BYTES = 4 << 30
"""Unless the pool's size is given, no more blocks than this are made for cached ones alone."""

MAX_CPU_POOL_BYTES = 1 << 30
"""Largest pool on the CPU unless its size is given."""

MIN_SLAB_BYTES = 16 << 20
NUM_SLABS = 16
"""Slabs of a large pool: it begins with one, and what it gives back are whole ones."""

WINDOWS_LONG = 4
MIN_WINDOWED_TOKENS = 1024
"""The pool of a model with sliding windows is divided for sequences this long: so many windows, and
at least so many tokens."""

CPU_HEADROOM_BYTES = 1 << 30

RUNNING_AHEAD = 2
"""Set aside so many times what some layers need: while the device computes them, the host goes on
with the next ones."""

SMALL_CHUNK = 512
"""Tokens of a prompt in a step where more of them would take much memory."""

MIN_STEP_TOKENS = 64
"""Steps are made no smaller than that to leave more memory to the pool."""

OVERSHOOT = 16
"""MLX exceeds its limit by less than this part of what is set aside for a step, but with large
steps, which ``HandOver`` sees to."""

STATE_ONLY_TOKENS = 1 << 20
"""Tokens that the pool counts for a model that keeps no K and V: its blocks take no memory."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How large the pool may become, and how it grows.

    Attributes:
        num_blocks: Most blocks for each KV group.
        num_kept_blocks: From so many on, cached blocks are evicted before the pool grows.
        slab_blocks: What it has at first; later it has a multiple of them.
        block_bytes: Bytes of one block over all groups.
        pool_bytes: Bytes of all blocks.
        capacity_tokens: Longest sequence that fits when it has the pool to itself.
        max_num_seqs: Sequences that may run at once, as set or as many as there is memory for.
        state_bytes: Set aside for the recurrent states of that many sequences.
    """

    num_blocks: tuple[int, ...]
    num_kept_blocks: tuple[int, ...]
    slab_blocks: int
    block_bytes: int
    pool_bytes: int
    capacity_tokens: int
    max_num_seqs: int
    state_bytes: int = 0


def device_memory_bytes() -> int:
    """Memory that the default device may use: the working set of a GPU, or physical memory."""
    if mx.default_device() == mx.Device(mx.gpu):
        info = mx.device_info()
        size = info.get("max_recommended_working_set_size") or info.get("memory_size")
        if size:
            return int(size)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fit_chunk(config: EngineConfig, layout: KVLayout, *, keeps_scores: bool) -> EngineConfig:
    """Choose how much of a prompt a step computes at most, unless the user did.

    The fewer steps, the less often a prompt's context is read again. But some attention keeps all
    scores of a chunk, and what a window has passed is given back only behind a chunk.

    Args:
        config: The user's wishes.
        layout: What the model keeps.
        keeps_scores: Whether its attention is of that kind, as it is on the CPU.
    """
    if config.prefill_chunk_size is not None:
        return config
    is_large = not keeps_scores and all(group.window is None for group in layout.groups)
    return replace(config, prefill_chunk_size=config.max_chunk if is_large else SMALL_CHUNK)


def fit_step(
    config: EngineConfig, spare_bytes: int, measure: Callable[[int], int]
) -> tuple[EngineConfig, int]:
    """Make steps so small that half of the memory beside the weights is left for the pool.

    Args:
        config: The user's wishes.
        spare_bytes: What there is beside the weights.
        measure: Bytes that a chunk of so many tokens needs.

    Returns:
        The settings with what a step computes, and the bytes that it needs beside weights and pool.
    """
    num_tokens, chunk = config.max_num_batched_tokens, config.max_chunk
    needed = measure(chunk)
    while True:
        headroom = RUNNING_AHEAD * -(-needed * num_tokens // chunk)
        if 2 * headroom <= spare_bytes or num_tokens <= MIN_STEP_TOKENS:
            break
        num_tokens = max(num_tokens // 2, MIN_STEP_TOKENS)
        if num_tokens < chunk:
            chunk = num_tokens
            needed = measure(chunk)
    if num_tokens < config.max_num_batched_tokens:
        config = replace(config, max_num_batched_tokens=num_tokens, prefill_chunk_size=chunk)
    return config, headroom


def fit_step_to_device(
    config: EngineConfig, adapter: ModelAdapter, writer: PoolWriter, parameter_bytes: int
) -> tuple[EngineConfig, int]:
    """The same by running such chunks.

    On the CPU, where that would take seconds and the default pool is small, a fixed amount is set
    aside, and nothing where the pool's size is given.

    Args:
        config: The user's wishes.
        adapter: Of the model to be served.
        writer: How the pool will be written.
        parameter_bytes: Size of the weights.
    """
    if mx.default_device() != mx.Device(mx.gpu):
        return config, CPU_HEADROOM_BYTES
    if config.num_blocks is not None or config.kv_cache_memory is not None:
        return config, 0
    spare = int(device_memory_bytes() * config.gpu_memory_utilization) - parameter_bytes
    return fit_step(config, spare, lambda rows: _measure_chunk(adapter, rows, writer))


def _measure_chunk(adapter: ModelAdapter, num_rows: int, writer: PoolWriter) -> int:
    """Bytes that a chunk needs besides weights and pool.

    The host waits for the device whenever it has handed over layers, and MLX where none are, so
    that it is what a step can't do without; with as much again the host can run ahead.
    """
    adapter.rest()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    limits = MemoryLimits(before)
    is_short, adapter.hand_over.memory_is_short = adapter.hand_over.memory_is_short, lambda: True
    try:
        run_chunk(adapter, num_rows, make_pool(adapter, num_rows, writer))
    finally:
        limits.undo()
        adapter.hand_over.memory_is_short = is_short
    peak = mx.get_peak_memory() - before
    mx.clear_cache()
    return peak


def memory_limit(config: EngineConfig, parameter_bytes: int) -> int | None:
    """What MLX may use in all, so that an engine stays within its share of the device.

    Args:
        config: The user's wishes.
        parameter_bytes: Size of the weights, which are there already.

    Returns:
        Bytes, what others use in this process included; None where no share counts.
    """
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    if not on_gpu or config.num_blocks is not None or config.kv_cache_memory is not None:
        return None
    others = max(0, mx.get_active_memory() - parameter_bytes)
    return others + int(device_memory_bytes() * config.gpu_memory_utilization)


def plan_pool(
    config: EngineConfig,
    layout: KVLayout,
    *,
    parameter_bytes: int,
    headroom_bytes: int,
    device_bytes: int,
    on_gpu: bool,
) -> PoolPlan:
    """Size the pool: ``num_blocks`` if set, else ``kv_cache_memory``, else what is left over.

    Recurrent states come out of the same memory, and on top of a given number of blocks. They take
    up to half of it; with less room fewer sequences may run at once.

    Args:
        config: The user's wishes.
        layout: What a block costs.
        parameter_bytes: Size of the weights.
        headroom_bytes: What a step needs besides weights and pool.
        device_bytes: What the device may use in all.
        on_gpu: Which default limit applies.

    Raises:
        InvalidRequestError: Not even one block fits; names the setting and the numbers.
    """
    block_bytes = sum(layout.block_bytes(group) for group in range(len(layout.groups)))
    kept_bytes = None
    if config.num_blocks is not None:
        available = config.num_blocks * block_bytes
        field = "num_blocks"
    elif config.kv_cache_memory is not None:
        available = config.kv_cache_memory
        field = "kv_cache_memory"
    else:
        share = int(device_bytes * config.gpu_memory_utilization)
        available = share - parameter_bytes - headroom_bytes
        if not on_gpu:
            available = min(available, MAX_CPU_POOL_BYTES)
        kept_bytes = KEPT_BYTES
        field = "gpu_memory_utilization"
    max_num_seqs = config.max_num_seqs
    if layout.state_bytes and config.num_blocks is None:
        for_states = available // 2 if block_bytes else available
        max_num_seqs = max(1, min(max_num_seqs, for_states // layout.state_bytes))
        available -= max_num_seqs * layout.state_bytes
    state_bytes = max_num_seqs * layout.state_bytes
    num_blocks = (config.num_blocks or STATE_ONLY_TOKENS // layout.block_size,) * len(layout.groups)
    if block_bytes and config.num_blocks is None:
        num_blocks = _divide(available, layout, _windows(config, layout))
    pool_bytes = _pool_bytes(layout, num_blocks)
    if min(num_blocks) < 1:
        state = f" beside a state of {layout.state_bytes}" if layout.state_bytes else ""
        raise InvalidRequestError(
            field,
            f"leaves {max(available, 0)} bytes for the pool, but one block takes {block_bytes}"
            f"{state} (the weights take {parameter_bytes} of {device_bytes})",
            hint="ask for more, or take a smaller model",
        )
    if pool_bytes + state_bytes + parameter_bytes > device_bytes:
        raise InvalidRequestError(
            field,
            f"asks for {pool_bytes + state_bytes} bytes of blocks and states beside "
            f"{parameter_bytes} of weights, but the device has {device_bytes}",
            hint="ask for fewer blocks, fewer sequences or less memory",
        )
    num_kept = num_blocks
    slab_blocks = max(num_blocks)
    if pool_bytes:
        slab_bytes = max(pool_bytes // NUM_SLABS, MIN_SLAB_BYTES)
        slab_blocks = min(slab_blocks, -(-slab_bytes * max(num_blocks) // pool_bytes))
        if kept_bytes is not None and kept_bytes < pool_bytes:
            num_kept = tuple(count * kept_bytes // pool_bytes for count in num_blocks)
    return PoolPlan(
        num_blocks=num_blocks,
        num_kept_blocks=num_kept,
        slab_blocks=slab_blocks,
        block_bytes=block_bytes,
        pool_bytes=pool_bytes,
        capacity_tokens=max(num_blocks) * layout.block_size,
        max_num_seqs=max_num_seqs,
        state_bytes=state_bytes,
    )


def _windows(config: EngineConfig, layout: KVLayout) -> Windows:
    return Windows(layout.groups, layout.block_size, config.max_chunk)


def _divide(available: int, layout: KVLayout, windows: Windows) -> tuple[int, ...]:
    """The most blocks for each group that these bytes pay for.

    Groups whose window passes get what suits sequences of ``WINDOWS_LONG`` windows, and at least
    what the longest sequence holds. With shorter ones their blocks run out first, with longer ones
    those of the other groups.
    """

    def numbers(num_blocks: int) -> tuple[int, ...]:
        counts = [num_blocks] * len(layout.groups)
        for group in windows.passing:
            window = layout.groups[group].window
            assert window is not None
            length = max(WINDOWS_LONG * window, MIN_WINDOWED_TOKENS)
            share = min(1.0, (window + 2 * layout.block_size) / length)
            held = windows.num_held(group, num_blocks)
            counts[group] = min(num_blocks, max(held, math.ceil(num_blocks * share)))
        return tuple(counts)

    low, high = (
        0,
        1 + available // min(layout.block_bytes(group) or available for group in windows.keeping),
    )
    while high - low > 1:
        middle = (low + high) // 2
        if _pool_bytes(layout, numbers(middle)) <= available:
            low = middle
        else:
            high = middle
    return numbers(low)


def _pool_bytes(layout: KVLayout, num_blocks: tuple[int, ...]) -> int:
    return sum(count * layout.block_bytes(group) for group, count in enumerate(num_blocks))
