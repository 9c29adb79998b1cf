"""Reads from a model's folder how it gives embeddings: the layout of sentence-transformers.

There, ``modules.json`` lists what a text goes through: the model, a pooling, perhaps more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pagedmlx.core.pooling import EmbeddingSpec, NoEmbedding, Pooling
from pagedmlx.errors import first_line

MODULES_FILE = "modules.json"

_PREFIX = "pooling_mode_"
_MODES: Mapping[str, Pooling] = {
    "lasttoken": Pooling.LAST,
    "cls_token": Pooling.FIRST,
    "cls": Pooling.FIRST,
    "mean_tokens": Pooling.MEAN,
    "mean": Pooling.MEAN,
}
_KINDS = ("Transformer", "Pooling", "Normalize")
_SIZE_KEYS = ("hidden_size", "n_embd", "d_model", "dim")


class _RefusedError(Exception):
    """Why the folder gives no embeddings."""


def read_embedding(path: Path, config: Mapping[str, Any]) -> EmbeddingSpec | NoEmbedding:
    """How a model gives embeddings, or why it gives none; never raises.

    Args:
        path: Its folder or file.
        config: Its config.json.
    """
    if not (path / MODULES_FILE).is_file():
        where = "its folder" if path.is_dir() else "a GGUF file"
        return NoEmbedding(
            f"{where} has no {MODULES_FILE}",
            hint="take a folder laid out for sentence-transformers, such as Qwen3-Embedding's",
        )
    try:
        return _read(path, config)
    except _RefusedError as error:
        return NoEmbedding(str(error))


def _read(path: Path, config: Mapping[str, Any]) -> EmbeddingSpec:
    modules = _modules(path)
    parts = [config, *(p for p in (config.get("text_config"),) if isinstance(p, Mapping))]
    for part in parts:
        if part.get("is_causal") is False or part.get("use_bidirectional_attention"):
            raise _RefusedError("its tokens attend in both directions, which isn't supported")
    settings = _json_object(path, "sentence_bert_config.json", required=False)
    if settings.get("do_lower_case"):
        raise _RefusedError("sentence_bert_config.json has do_lower_case, which isn't supported")
    pooling = _json_object(path, f"{modules['Pooling'].strip('/')}/config.json")
    return EmbeddingSpec(
        pooling=_mode(pooling),
        num_dimensions=_num_dimensions(pooling, parts),
        is_normalized="Normalize" in modules,
        is_matryoshka=any(p.get("is_matryoshka") or p.get("matryoshka_dimensions") for p in parts),
        max_len=_positive(settings.get("max_seq_length")),
    )


def _modules(path: Path) -> dict[str, str]:
    """The folders of the modules by their kinds, in order."""
    listed = _json(path, MODULES_FILE)
    found: dict[str, str] = {}
    for each in cast("list[Any]", listed) if isinstance(listed, list) else [None]:
        kind, folder = (each.get("type"), each.get("path")) if isinstance(each, dict) else (0, 0)
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise _RefusedError(f"{MODULES_FILE} is no list of modules")
        name = kind.rpartition(".")[2]
        if not kind.startswith("sentence_transformers.") or name not in _KINDS or name in found:
            raise _RefusedError(f"{MODULES_FILE} has a module {kind[:80]!r}, which isn't supported")
        if ".." in folder or folder.startswith("/") or (name == "Transformer" and folder):
            raise _RefusedError(f"{MODULES_FILE} has {name} in {folder[:80]!r}")
        found[name] = folder
    if tuple(found) not in (_KINDS, _KINDS[:2]):
        raise _RefusedError(
            f"{MODULES_FILE} has {', '.join(found) or 'nothing'}; it must be Transformer, Pooling "
            "and at most Normalize"
        )
    return found


def _mode(pooling: Mapping[str, Any]) -> Pooling:
    named = pooling.get("pooling_mode")
    names = [named] if isinstance(named, str) else list(cast("list[Any]", named or ()))
    names += [
        key.removeprefix(_PREFIX)
        for key, value in pooling.items()
        if key.startswith(_PREFIX) and value is True
    ]
    if len(names) != 1 or names[0] not in _MODES:
        shown = " and ".join(str(name)[:40] for name in names) or "none"
        raise _RefusedError(
            f"its pooling is {shown}; supported are last token, first token and mean"
        )
    return _MODES[names[0]]


def _num_dimensions(pooling: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> int:
    sizes = (_positive(part.get(key)) for part in reversed(parts) for key in _SIZE_KEYS)
    own = next(filter(None, sizes), None)
    told = _positive(pooling.get("word_embedding_dimension", pooling.get("embedding_dimension")))
    if own is None and told is None:
        raise _RefusedError("neither its pooling nor config.json say how many dimensions it has")
    if own is not None and told is not None and own != told:
        raise _RefusedError(f"its pooling has {told} dimensions, config.json {own}")
    return told or own or 0


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value is not True and value > 0 else None


def _json_object(path: Path, name: str, *, required: bool = True) -> Mapping[str, Any]:
    if not required and not (path / name).exists():
        return {}
    value = _json(path, name)
    if not isinstance(value, dict):
        raise _RefusedError(f"{name} is not a JSON object")
    return value


def _json(path: Path, name: str) -> Any:
    try:
        return json.loads((path / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _RefusedError(f"its folder has no {name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _RefusedError(f"{name} can't be read: {first_line(error)}") from error
