"""Loads a model from local files into mlx-lm's own classes; never touches a network."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pagedmlx.core.pooling import EmbeddingSpec, NoEmbedding
from pagedmlx.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError, first_line
from pagedmlx.models.body_only import loading_settings
from pagedmlx.models.embedding import read_embedding
from pagedmlx.models.generation import (
    SamplingDefaults,
    end_token_ids,
    generation_config_of_gguf,
    sampling_defaults,
)
from pagedmlx.models.gguf_weights import load_gguf
from pagedmlx.models.weights import (
    cast_parameters,
    check_memory,
    dequantize,
    main_dtype,
    named_parameters,
)
from pagedmlx.progress import ProgressCallback, ignore_progress

DTYPES: Mapping[str, mx.Dtype] = {
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "float32": mx.float32,
}
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_positions",
    "n_ctx",
    "model_max_length",
)
_MAX_INT = 2**31 - 1
_MAX_LAYERS = 10_000
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "vocab_size"), _MAX_INT),
    # mlx-lm would make layers until memory is gone.
    **dict.fromkeys(_LAYER_KEYS, _MAX_LAYERS),
}
"""The largest that a size in a config may be."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with what the engine must know of it.

    Attributes:
        model: mlx-lm's module, evaluated.
        config: Its config.json, or the same made from GGUF metadata.
        path: The folder or ``.gguf`` file.
        model_type: As in the config.
        max_model_len: Longest context in tokens by the config; None when it doesn't say.
        eos_token_ids: From the config and generation_config.json together.
        gguf_metadata: Plain Python values, for the tokenizer; None unless a GGUF file.
        dtype: Type of the weights that aren't quantised, by name.
        model_id: Changes with the files and the type; part of the prefix cache's salt.
        parameter_bytes: Size of all weights.
        sampling: How the model's maker wants it sampled.
        embedding: How it gives embeddings, or why it gives none.
    """

    model: nn.Module
    config: Mapping[str, Any]
    path: Path
    model_type: str
    max_model_len: int | None
    eos_token_ids: frozenset[int]
    gguf_metadata: Mapping[str, Any] | None
    dtype: str
    model_id: str
    parameter_bytes: int
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    embedding: EmbeddingSpec | NoEmbedding = NoEmbedding("it was not read from a folder")  # noqa: RUF009


def load_model(
    path: str | Path,
    *,
    name: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    max_bytes: int | None = None,
    on_progress: ProgressCallback | None = None,
) -> LoadedModel:
    """Load a folder that mlx-lm can load, or a ``.gguf`` file.

    Args:
        path: The folder or file.
        name: What to call it in messages; None is the path's last part.
        dtype: ``auto`` keeps the file's type, and is float32 on the CPU, where quantised weights
            are expanded too (its float32 matrix product is by far the fastest).
        trust_remote_code: Run a Python file that the config names as the model's code.
        max_bytes: Most memory that the weights may take, in the form in which they are computed
            with; None is no limit.
        on_progress: Told what is being done.

    Raises:
        ModelNotFoundError: Nothing is at the path.
        ModelLoadError: Files are missing or damaged, or memory is too small.
        UnsupportedModelError: A model type, tensor type or code that isn't run.
    """
    path = Path(path).expanduser().resolve()
    report = on_progress or ignore_progress
    if not path.exists():
        raise ModelNotFoundError(
            f"{path}: no such folder or file", hint="check the path, or give a model's name"
        )
    name = name or path.name
    report(f"reading {name}", None)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    wanted = DTYPES.get("float32" if dtype == "auto" and on_cpu else dtype)
    gguf_metadata = None
    generation: Mapping[str, Any] = {}
    if path.is_dir():
        model, config = _load_folder(path, name, trust_remote_code)
        generation = _read_json(path / "generation_config.json", name, required=False)
    else:
        model, config, gguf_metadata = load_gguf(path, max_bytes)
        generation = generation_config_of_gguf(gguf_metadata)
    hint = ""
    if on_cpu and wanted == mx.float32:
        if dequantize(model) and dtype == "auto":
            hint = "--dtype float16 keeps them quantised; or take a smaller model"
    elif wanted is None and gguf_metadata is not None:
        # Norms are float32 in every GGUF file and would lift all activations to it.
        wanted = main_dtype(model)
    if wanted is not None:
        cast_parameters(model, wanted)
    # Nothing has been read so far: MLX's arrays are lazy.
    parameter_bytes = sum(array.nbytes for _, array in named_parameters(model))
    dtype_name = str(wanted or main_dtype(model)).removeprefix("mlx.core.")
    what = f"{name}: its weights in {dtype_name}"
    check_memory(parameter_bytes, max_bytes, what, hint=hint)
    _evaluate(model, name, parameter_bytes, report)
    return LoadedModel(
        model=model,
        config=config,
        path=path,
        model_type=config["model_type"],
        max_model_len=_max_model_len(config),
        eos_token_ids=end_token_ids(config) | end_token_ids(generation),
        gguf_metadata=gguf_metadata,
        dtype=dtype_name,
        model_id=_model_id(path, dtype_name),
        parameter_bytes=parameter_bytes,
        sampling=sampling_defaults(generation),
        embedding=read_embedding(path, config),
    )


def _load_folder(
    path: Path, name: str, trust_remote_code: bool
) -> tuple[nn.Module, dict[str, Any]]:
    gguf = next(iter(sorted(path.glob("*.gguf"))), None)
    if gguf is not None and not (path / "config.json").exists():
        raise ModelLoadError(
            f"{name}: the folder has a GGUF file and no config.json", hint=f"give {gguf}"
        )
    config = _read_json(path / "config.json", name, required=True)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not re.fullmatch(r"[\w.-]+", model_type):
        raise ModelLoadError(
            f"{name}: config.json has model_type {model_type!r}", hint="it must be a name"
        )
    _check_sizes(config, name)
    if config.get("model_file") is not None and not trust_remote_code:
        raise UnsupportedModelError(
            f"{name}: the model wants to run its own code ({config['model_file']!r})",
            hint="read that file, then allow it with --trust-remote-code",
        )
    _check_weight_files(path, name)
    from mlx_lm import utils

    try:
        return utils.load_model(
            path, lazy=True, trust_remote_code=trust_remote_code, **loading_settings(path)
        )
    except (Exception, SystemExit) as error:
        # mlx-lm raises what it comes across, and one model exits when a package is missing.
        reason = first_line(error)
        if isinstance(error, ValueError) and "not supported" in reason:
            raise UnsupportedModelError(
                f"{name}: mlx-lm has no model type {model_type!r}",
                hint="pagedmlx runs the model types of mlx-lm",
            ) from error
        raise ModelLoadError(
            f"{name}: mlx-lm can't load it: {reason}",
            hint="the files are incomplete, damaged, or of another form than MLX's",
        ) from error


def _check_sizes(config: Mapping[str, Any], name: str) -> None:
    part, prefix = config, ""
    if isinstance(config.get("text_config"), Mapping):
        # What stands beside it is not of the text model, or is not looked at.
        part, prefix = config["text_config"], "text_config."
    for key, high in _SIZES.items():
        value = part.get(key)
        if value is None:  # some types have another way to say it
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise ModelLoadError(
                f"{name}: config.json has {prefix}{key} {value!r}",
                hint=f"it must be a whole number from 1 to {high}",
            )


def _check_weight_files(path: Path, name: str) -> None:
    present = {file.name for file in path.glob("model*.safetensors")}
    index = _read_json(path / "model.safetensors.index.json", name, required=False)
    named = index.get("weight_map", {})
    if isinstance(named, dict):
        missing = sorted({str(file) for file in named.values()} - present)
        if missing:
            raise ModelLoadError(
                f"{name}: {len(missing)} of the index's weight files are missing, "
                f"the first is {missing[0]}",
                hint="fetch the model again",
            )
    if not present:
        raise ModelLoadError(
            f"{name}: no weights (model*.safetensors) in the folder",
            hint="give a folder that mlx-lm can load, or a .gguf file",
        )


def _evaluate(model: nn.Module, name: str, total: int, report: ProgressCallback) -> None:
    """Bring the weights, ``total`` bytes, into memory, a few at a time."""
    parameters = [array for _, array in named_parameters(model)]
    done = 0
    try:
        for batch in _batches(parameters):
            mx.eval(batch)
            done += sum(array.nbytes for array in batch)
            report(f"loading {name}", done / total)
    except RuntimeError as error:
        raise ModelLoadError(
            f"{name}: its weights can't be read: {first_line(error)}",
            hint="the files are damaged, or memory is too small",
        ) from error


def _batches(arrays: list[mx.array], max_bytes: int = 1 << 28) -> Iterator[list[mx.array]]:
    batch: list[mx.array] = []
    size = 0
    for array in arrays:
        if batch and size + array.nbytes > max_bytes:
            yield batch
            batch, size = [], 0
        batch.append(array)
        size += array.nbytes
    if batch:
        yield batch


def _read_json(path: Path, name: str, *, required: bool) -> dict[str, Any]:
    if not path.exists() and not required:
        return {}
    where = f"{name}: {path.name}"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(
            f"{where} is missing", hint="give a folder that mlx-lm can load, or a .gguf file"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{where} can't be read: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{where} is not a JSON object")
    return value


def _max_model_len(config: Mapping[str, Any]) -> int | None:
    for part in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            value = part.get(key) if isinstance(part, Mapping) else None
            if isinstance(value, int) and value > 0:
                return value
    return None


def _model_id(path: Path, dtype: str) -> str:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{path}\0{dtype}".encode())
    for file in files:
        status = file.stat()
        digest.update(f"\0{file.name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()
