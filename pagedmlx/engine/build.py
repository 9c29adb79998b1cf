"""Makes an Engine for a model in memory: attention path, pool, warm-up, then the scheduler."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import mlx.core as mx

from pagedmlx.config import EngineConfig
from pagedmlx.core.kv_manager import KVManager
from pagedmlx.core.pooling import EmbeddingSpec, NoEmbedding
from pagedmlx.core.scheduler import Scheduler
from pagedmlx.engine.cascade_gain import measure_cascade_gain, shapes_to_try
from pagedmlx.engine.cheap_tokens import measure_cheap_tokens
from pagedmlx.engine.engine import Engine
from pagedmlx.engine.grammars import grammar_backend
from pagedmlx.engine.inputs import EngineLimits
from pagedmlx.engine.limits import MemoryLimits
from pagedmlx.engine.memory import (
    OVERSHOOT,
    RUNNING_AHEAD,
    PoolPlan,
    device_memory_bytes,
    fit_chunk,
    fit_step_to_device,
    memory_limit,
    plan_pool,
)
from pagedmlx.engine.runner import ModelRunner
from pagedmlx.engine.tool_syntax import find_tool_syntax
from pagedmlx.engine.warm_up import serve_made_up_requests
from pagedmlx.errors import (
    InvalidRequestError,
    KernelError,
    ModelLoadError,
    UnsupportedModelError,
    first_line,
)
from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import PoolWriter
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.flat_rows import keep_rows_flat
from pagedmlx.models.fused import fuse_projections
from pagedmlx.models.loader import LoadedModel
from pagedmlx.models.parts import RowLayout
from pagedmlx.models.probe import ProbeResult, probe_model
from pagedmlx.models.residual import add_in_products
from pagedmlx.ops import attention_paths
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.tuning import compile_kernels, tune
from pagedmlx.progress import ProgressCallback
from pagedmlx.sampling.greedy import by_kernel
from pagedmlx.sampling.sampler import Sampler
from pagedmlx.text.tokenizer import Tokenizer

MAX_PROMPT_LOGITS = 1 << 24
"""Most logits that one step computes for log probabilities of prompts: rows x vocabulary."""


def build_engine(
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    config: EngineConfig,
    *,
    notes: tuple[str, ...] = (),
    on_progress: ProgressCallback,
) -> Engine:
    """Make an engine for a loaded model, on this thread.

    Args:
        loaded: The model; its layers that read the same input are joined, which changes its
            modules and none of its results, and on a GPU some add their output themselves.
        tokenizer: Its tokenizer.
        config: Settings; the model's name in them is not looked at.
        notes: Lines for the user that come before the engine's own.
        on_progress: Told what is being done.

    Raises:
        UnsupportedModelError: No attention path gives the model's own logits.
        InvalidRequestError: A setting asks for more than model or device have.
        ModelLoadError: The device refuses the pool's memory.
    """
    with ExitStack() as undo:
        fuse_projections(loaded.model)
        keep_rows_flat(loaded.model)
        on_gpu = mx.default_device() == mx.Device(mx.gpu)
        if on_gpu:
            # Fewer launches; a CPU has none, and keeps mlx-lm's own rounding.
            add_in_products(loaded.model)
        on_progress("checking the model against mlx-lm", None)
        limit = memory_limit(config, loaded.parameter_bytes)
        adapter, writer, attention = _adapt(loaded, config, undo, on_progress)
        sampler, sampling = _sampler(adapter, loaded.dtype)
        wanted = config.max_num_batched_tokens
        config = fit_chunk(config, adapter.layout, keeps_scores=_keeps_scores(adapter))
        config, headroom = fit_step_to_device(config, adapter, writer, loaded.parameter_bytes)
        plan = plan_pool(
            config,
            adapter.layout,
            parameter_bytes=loaded.parameter_bytes,
            headroom_bytes=headroom,
            device_bytes=device_memory_bytes(),
            on_gpu=on_gpu,
        )
        limits = EngineLimits(
            max_model_len=_max_model_len(config, loaded),
            capacity_tokens=plan.capacity_tokens,
            block_size=config.block_size,
            vocab_size=adapter.vocab_size,
        )
        if on_gpu:
            on_progress("serving made-up requests", None)
            serve_made_up_requests(adapter, writer, config, limits.max_model_len, sampler)
        chunk_multiple = 1
        if on_gpu or isinstance(adapter.backend, KernelBackend):
            on_progress("measuring", None)
        if isinstance(adapter.backend, KernelBackend):
            chunk_multiple = adapter.backend.chunk_multiple(config.max_chunk)
            attention += tune(
                adapter.backend,
                config.max_chunk,
                limits.max_model_len,
                shapes_to_try(adapter, plan, limits),
                partial(measure_cascade_gain, adapter, writer),
            )
        cheap_tokens = config.block_size
        if on_gpu and config.max_stream_gap_ms:
            most = min(config.max_chunk, limits.max_model_len)
            cheap_tokens = measure_cheap_tokens(adapter, writer, cheap_tokens, most)
        mx.clear_cache()  # of the pools that were measured with
        memory_limits = MemoryLimits(None if limit is None else limit - headroom // OVERSHOOT)
        undo.callback(memory_limits.undo)
        needed = headroom // RUNNING_AHEAD
        adapter.hand_over.memory_is_short = lambda: not MemoryLimits.leaves(needed)
        on_progress("allocating the pool", None)
        config = replace(config, max_num_seqs=plan.max_num_seqs)
        embedding = loaded.embedding
        if not adapter.gives_hidden_states:
            embedding = NoEmbedding("its last norm is a part of its head")
        store = _allocate(adapter, plan, config, writer)
        kv = KVManager(
            adapter.layout.groups,
            plan.num_blocks,
            config.block_size,
            # A recurrent state is known at one place of a text only, so blocks alone are no help.
            enable_prefix_caching=config.enable_prefix_caching and not plan.state_bytes,
            salts=(loaded.model_id, adapter.layout.dtype),
            num_kept_blocks=plan.num_kept_blocks,
            slab_blocks=plan.slab_blocks,
            max_chunk=config.max_chunk,
        )
        engine = Engine(
            config,
            Scheduler(
                kv,
                config,
                max_prompt_logits=max(1, MAX_PROMPT_LOGITS // adapter.vocab_size),
                chunk_multiple=chunk_multiple,
            ),
            ModelRunner(adapter, store, sampler, memory_limits.undo),
            tokenizer,
            limits,
            cheap_tokens=cheap_tokens,
            block_bytes=plan.block_bytes,
            pool_bytes=plan.pool_bytes,
            state_bytes=plan.state_bytes,
            notes=(
                f"device: {'GPU' if on_gpu else 'CPU'}, weights in {loaded.dtype}",
                *notes,
                *attention,
                *sampling,
                *_step_notes(config, wanted),
                *_pool_notes(plan, limits),
                *_state_notes(plan, config),
                *_embedding_notes(embedding),
                *loaded.sampling.notes,
            ),
            sampling_defaults=loaded.sampling.values,
            grammars=grammar_backend(tokenizer, adapter.vocab_size),
            answer_style=tokenizer.find_style(find_tool_syntax),
            embedding=embedding,
        )
        undo.pop_all()
        return engine


def _adapt(
    loaded: LoadedModel, config: EngineConfig, undo: ExitStack, on_progress: ProgressCallback
) -> tuple[ModelAdapter, PoolWriter, list[str]]:
    """Find the first attention path that gives the model's own logits.

    Returns:
        The model over that path, the path's writer, and lines for the user.

    Raises:
        UnsupportedModelError: None of them does.
    """
    paths = attention_paths(config.attention_backend)
    problem: UnsupportedModelError | None = None
    layouts = list(RowLayout)
    while layouts:
        notes: list[str] = []
        tried = layouts[-1]
        for path in paths:
            try:
                adapter = ModelAdapter(
                    loaded,
                    path.backend,
                    block_size=config.block_size,
                    kv_cache_dtype=config.kv_cache_dtype,
                    layouts=layouts,
                )
            except UnsupportedModelError as error:
                raise problem or error from error
            undo.enter_context(adapter)
            tried = adapter.row_layout
            try:
                probe = probe_model(adapter, path.writer)
                if isinstance(path.backend, KernelBackend):
                    for done in compile_kernels(path.backend):
                        on_progress("compiling kernels", done)
            except (UnsupportedModelError, KernelError) as error:
                adapter.close()
                problem = UnsupportedModelError(str(error), hint=error.hint)
                notes.append(f"attention: not by {path.backend.name}, slower instead: {error}")
                continue
            notes.append(_attention_note(adapter, probe))
            return adapter, path.writer, notes
        # The next way to lay out rows may suit the model where this one did not.
        layouts = layouts[layouts.index(tried) + 1 :]
    assert problem is not None, "there is always a path"
    raise problem


def _attention_note(adapter: ModelAdapter, probe: ProbeResult) -> str:
    how = "gathered K and V" if adapter.reads_gathers else adapter.backend.name
    if adapter.row_layout is not RowLayout.TOKEN_ROWS:
        how += f" in {adapter.row_layout}"
    return f"attention: {how}; logits within {probe.error:.1g} of mlx-lm's"


def _sampler(adapter: ModelAdapter, dtype: str) -> tuple[Sampler, list[str]]:
    """The sampler, and a line for the user where a kernel should have helped it and doesn't."""
    backend = adapter.backend
    if not isinstance(backend, KernelBackend):
        return Sampler(), []
    try:
        # What processors have changed is float32.
        kernel = by_kernel(backend.launcher, (dtype, "float32"), adapter.vocab_size)
    except (KernelError, RuntimeError) as error:  # the latter is MLX's, of memory too
        return Sampler(), [f"most likely tokens: by MLX, slower instead: {first_line(error)}"]
    return Sampler(find_most_likely=kernel), []


def _allocate(
    adapter: ModelAdapter, plan: PoolPlan, config: EngineConfig, writer: PoolWriter
) -> KVStore:
    try:
        return KVStore(adapter.layout, plan.num_blocks, config.pool_fill, writer, plan.slab_blocks)
    except RuntimeError as error:  # MLX's word for memory that the device doesn't give
        raise ModelLoadError(
            f"the pool of {plan.pool_bytes} bytes can't be allocated: {error}",
            hint="ask for fewer blocks or less memory",
        ) from error


def _step_notes(config: EngineConfig, wanted: int) -> list[str]:
    fitting = config.max_num_batched_tokens
    if fitting == wanted:
        return []
    return [f"steps: at most {fitting} tokens instead of {wanted}, to leave memory to the pool"]


def _pool_notes(plan: PoolPlan, limits: EngineLimits) -> list[str]:
    counts = " and ".join(map(str, dict.fromkeys(plan.num_blocks)))
    notes = [
        f"pool: up to {counts} blocks of {limits.block_size} tokens, "
        f"{plan.pool_bytes / 2**20:.0f} MiB; memory is taken as they fill"
    ]
    if limits.max_len < limits.max_model_len:
        notes.append(
            f"context: {limits.max_len} tokens, all that the pool holds "
            f"(the model has {limits.max_model_len})"
        )
    return notes


def _state_notes(plan: PoolPlan, config: EngineConfig) -> list[str]:
    if not plan.state_bytes:
        return []
    notes = [
        f"states: at most {plan.max_num_seqs} sequences at once, "
        f"{plan.state_bytes / 2**20:.1f} MiB for their recurrent states"
    ]
    if config.enable_prefix_caching:
        notes.append("prefix cache: off, as a recurrent state can't be shared by its blocks")
    return notes


def _keeps_scores(adapter: ModelAdapter) -> bool:
    """Whether some layer's attention keeps all scores of a prompt's chunk at once."""
    backend = adapter.backend
    if adapter.reads_gathers or not isinstance(backend, KernelBackend):
        return True
    return backend.keeps_scores


def _embedding_notes(embedding: EmbeddingSpec | NoEmbedding) -> list[str]:
    if isinstance(embedding, NoEmbedding):
        return []
    length = ", normalized" if embedding.is_normalized else ""
    return [f"embeddings: {embedding.pooling}, {embedding.num_dimensions} dimensions{length}"]


def _max_model_len(config: EngineConfig, loaded: LoadedModel) -> int:
    own = loaded.max_model_len
    if config.max_model_len is None:
        if own is None:
            raise InvalidRequestError(
                "max_model_len",
                f"{loaded.model_type}: the model's config doesn't say how long its context is",
                hint="set --max-model-len",
            )
        return own
    if own is not None and config.max_model_len > own:
        raise InvalidRequestError(
            "max_model_len", f"{config.max_model_len} is more than the model's {own}"
        )
    return config.max_model_len
