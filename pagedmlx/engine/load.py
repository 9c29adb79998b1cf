"""Loads what an EngineConfig names, model and tokenizer, and makes an Engine of it.

Importing this module imports no MLX, so that a fast BLAS can be put in front of it first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedmlx.config import EngineConfig
from pagedmlx.engine.frames import clear_frames
from pagedmlx.progress import ProgressCallback, ignore_progress

if TYPE_CHECKING:
    from pagedmlx.engine.engine import Engine
    from pagedmlx.models.loader import LoadedModel
    from pagedmlx.text.tokenizer import Tokenizer


def load_engine(config: EngineConfig, on_progress: ProgressCallback | None = None) -> Engine:
    """Load the model that ``config`` names and make an engine for it.

    Call it on the thread that will run the engine; if it fails, that thread is done with MLX.

    Raises:
        PagedMLXError: The model is not there, can't be read, isn't supported, or doesn't fit.
    """
    from pagedmlx.models.blas import load_fast_blas

    blas = load_fast_blas()
    try:
        return _load(config, on_progress or ignore_progress, blas)
    except BaseException as error:
        from pagedmlx.engine.runner import release_mlx

        # The frames hold the weights that were loaded so far.
        clear_frames(error)
        release_mlx()
        raise


def _load(config: EngineConfig, report: ProgressCallback, blas: str) -> Engine:
    import mlx.core as mx

    from pagedmlx.engine.build import build_engine
    from pagedmlx.hub import resolve
    from pagedmlx.models.loader import load_model
    from pagedmlx.text.tokenizer import check_tokenizer_files

    resolved = resolve(config.model, config.revision, config.offline, report)
    if (resolved.path / "config.json").is_file():
        check_tokenizer_files(resolved.path, resolved.name)
    loaded = load_model(
        resolved.path,
        name=resolved.name if resolved.path.is_dir() else resolved.path.name,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        max_bytes=_max_weight_bytes(config),
        on_progress=report,
    )
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    return build_engine(
        loaded,
        _load_tokenizer(loaded, config),
        config,
        notes=() if on_gpu else (blas,),
        on_progress=report,
    )


def _max_weight_bytes(config: EngineConfig) -> int:
    from pagedmlx.engine.memory import device_memory_bytes

    # A pool of a given size may use what the share leaves to others.
    is_pool_given = config.num_blocks is not None or config.kv_cache_memory is not None
    share = 1.0 if is_pool_given else config.gpu_memory_utilization
    return int(device_memory_bytes() * share)


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
