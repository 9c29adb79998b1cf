"""Builds an Engine from an EngineConfig: model, tokenizer, probe, pool, scheduler, in that order.

Importing this module imports no MLX, so that a fast BLAS can be put in front of it first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pagedmlx.config import EngineConfig
from pagedmlx.engine.frames import clear_frames
from pagedmlx.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from pagedmlx.engine.engine import Engine
    from pagedmlx.kv.writer import PoolWriter
    from pagedmlx.models.adapter import ModelAdapter
    from pagedmlx.models.loader import LoadedModel
    from pagedmlx.text.tokenizer import Tokenizer

ProgressCallback = Callable[[str, float | None], None]
"""Called with what is being done and the share done, from 0 to 1, or None when unknown."""


WARM_UP_CONTEXTS = (512, 4096, 32768)
"""Lengths at which attention takes different kernels: whole, in chunks, in many chunks."""


def load_engine(config: EngineConfig, on_progress: ProgressCallback | None = None) -> Engine:
    """Load the model that ``config`` names and make an engine for it.

    Call it on the thread that will run the engine; if it fails, that thread is done with MLX.

    Raises:
        PagedMLXError: The model is not there, can't be read, isn't supported, or doesn't fit.
    """
    from pagedmlx.models.blas import load_fast_blas

    blas = load_fast_blas()
    try:
        with ExitStack() as undo:
            engine = _load(config, on_progress or _ignore, blas, undo)
            undo.pop_all()
            return engine
    except BaseException as error:
        from pagedmlx.engine.runner import release_mlx

        # The frames hold the weights that were loaded so far.
        clear_frames(error)
        release_mlx()
        raise


def _load(config: EngineConfig, report: ProgressCallback, blas: str, undo: ExitStack) -> Engine:
    import mlx.core as mx

    from pagedmlx.core.kv_manager import KVManager
    from pagedmlx.core.scheduler import Scheduler
    from pagedmlx.engine.engine import Engine
    from pagedmlx.engine.inputs import EngineLimits
    from pagedmlx.engine.memory import device_memory_bytes, measure_headroom, plan_pool
    from pagedmlx.engine.runner import ModelRunner
    from pagedmlx.hub import resolve
    from pagedmlx.kv.store import KVStore
    from pagedmlx.models.loader import load_model
    from pagedmlx.models.probe import warm_up
    from pagedmlx.sampling.sampler import Sampler

    resolved = resolve(config.model, config.revision)
    loaded = load_model(
        resolved.path,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        on_progress=report,
    )
    tokenizer = _load_tokenizer(loaded, config)
    report("checking the model against mlx-lm", None)
    adapter, writer, attention = _adapt(loaded, config, undo)
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    plan = plan_pool(
        config,
        adapter.layout,
        parameter_bytes=loaded.parameter_bytes,
        headroom_bytes=measure_headroom(adapter, config, writer),
        device_bytes=device_memory_bytes(),
        on_gpu=on_gpu,
    )
    if on_gpu:
        for context_len in WARM_UP_CONTEXTS:
            report("compiling kernels", WARM_UP_CONTEXTS.index(context_len) / len(WARM_UP_CONTEXTS))
            warm_up(adapter, writer, context_len)
    max_model_len = _max_model_len(config, loaded)
    limits = EngineLimits(
        max_model_len=max_model_len,
        capacity_tokens=plan.capacity_tokens,
        block_size=config.block_size,
        vocab_size=adapter.vocab_size,
    )
    kv = KVManager(
        adapter.layout.groups,
        plan.num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        salts=(loaded.model_id, adapter.layout.dtype),
    )
    report("allocating the pool", None)
    try:
        store = KVStore(adapter.layout, plan.num_blocks, config.pool_fill, writer)
    except RuntimeError as error:  # MLX's word for memory that the device doesn't give
        raise ModelLoadError(
            f"the pool of {plan.pool_bytes} bytes can't be allocated: {error}",
            hint="ask for fewer blocks or less memory",
        ) from error
    notes = [
        f"device: {'GPU' if on_gpu else 'CPU'}, weights in {loaded.dtype}",
        *([] if on_gpu else [blas]),
        *attention,
        f"pool: {plan.num_blocks[0]} blocks of {config.block_size} tokens, "
        f"{plan.pool_bytes / 2**20:.0f} MiB",
    ]
    if limits.max_len < max_model_len:
        notes.append(
            f"context: {limits.max_len} tokens, all that the pool holds "
            f"(the model has {max_model_len})"
        )
    return Engine(
        config,
        Scheduler(kv, config),
        ModelRunner(adapter, store, Sampler()),
        tokenizer,
        limits,
        block_bytes=plan.block_bytes,
        pool_bytes=plan.pool_bytes,
        notes=tuple(notes),
    )


def _adapt(
    loaded: LoadedModel, config: EngineConfig, undo: ExitStack
) -> tuple[ModelAdapter, PoolWriter, list[str]]:
    """Find the first attention path that gives the model's own logits.

    Returns:
        The model over that path, the path's writer, and lines for the user.

    Raises:
        UnsupportedModelError: None of them does.
    """
    from pagedmlx.models.adapter import ModelAdapter
    from pagedmlx.models.probe import probe_model
    from pagedmlx.ops import attention_paths

    paths = attention_paths(config.attention_backend)
    notes: list[str] = []
    for path in paths:
        adapter = ModelAdapter(
            loaded,
            path.backend,
            block_size=config.block_size,
            kv_cache_dtype=config.kv_cache_dtype,
        )
        undo.enter_context(adapter)
        try:
            probe = probe_model(adapter, path.writer)
        except UnsupportedModelError as error:
            if path is paths[-1]:
                raise
            adapter.close()
            notes.append(f"attention: not by {path.backend.name}, slower instead: {error}")
            continue
        notes.append(f"attention: {path.backend.name}; logits within {probe.error:.1g} of mlx-lm's")
        return adapter, path.writer, notes
    raise AssertionError("there is always a path")


def _load_tokenizer(loaded: LoadedModel, config: EngineConfig) -> Tokenizer:
    from pagedmlx.text.gguf_tokenizer import tokenizer_from_gguf
    from pagedmlx.text.tokenizer import load_tokenizer

    if loaded.gguf_metadata is not None:
        return tokenizer_from_gguf(loaded.gguf_metadata, source=loaded.path.name)
    return load_tokenizer(
        loaded.path,
        eos_token_ids=loaded.eos_token_ids,
        trust_remote_code=config.trust_remote_code,
    )


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


def _ignore(_what: str, _share: float | None) -> None:
    pass
