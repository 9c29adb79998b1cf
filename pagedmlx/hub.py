"""Where models live: names to local files, fetching, listing and removing. No MLX in here.

Hugging Face models stay in the Hugging Face cache; the embedded model has a place of ours.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pagedmlx.download import fetch_snapshot
from pagedmlx.embedded import (
    EMBEDDED_MODEL,
    EMBEDDED_PACKAGE,
    embedded_file,
    fetch_embedded,
    own_copy,
    storage_errors,
)
from pagedmlx.errors import InvalidRequestError, ModelNotFoundError, ModelStoreError
from pagedmlx.progress import ProgressCallback, ignore_progress

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

ModelKind = Literal["embedded", "folder", "gguf", "hub"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on this machine.

    Attributes:
        path: A folder, or a ``.gguf`` file.
        name: What to call it: the embedded name, the hub id, or the path's last part.
        kind: Where it came from.
    """

    path: Path
    name: str
    kind: ModelKind


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model in a cache.

    Attributes:
        name: The name that commands take.
        kind: ``embedded`` or ``hub``.
        size_bytes: Size on disk.
        path: The file or folder.
        removable: Whether ``remove`` may delete it; a file of a Python package is pip's.
    """

    name: str
    kind: ModelKind
    size_bytes: int
    path: Path
    removable: bool


def resolve(
    name: str,
    revision: str | None = None,
    offline: bool = False,
    on_progress: ProgressCallback | None = None,
) -> ResolvedModel:
    """Find a model by name; a Hugging Face model that is not here yet is fetched.

    A name is tried as the embedded model, then as a path, then as a Hugging Face id; what is
    already here never needs the network.

    Args:
        name: ``smollm2``, a folder or ``.gguf`` file (``~`` is expanded), or ``owner/model``.
        revision: Branch, tag or commit of a Hugging Face model.
        offline: Never use the network; the variable HF_HUB_OFFLINE says the same.
        on_progress: Called with a stage and, when known, the part done (0 to 1).

    Raises:
        InvalidRequestError: A revision of a model that has none.
        ModelNotFoundError: No model of that name, or none within reach.
        ModelStoreError: It exists but could not be fetched.
    """
    if name == EMBEDDED_MODEL:
        path = embedded_file()
        if path is None:
            raise ModelNotFoundError(
                f"{EMBEDDED_MODEL} is not on this machine yet",
                hint=f"pagedmlx pull {EMBEDDED_MODEL}",
            )
        return _without_revision(ResolvedModel(path, EMBEDDED_MODEL, "embedded"), revision)
    local = _local_path(name)
    if local is not None:
        return _without_revision(local, revision)
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(
            f"{name!r} is neither a model's name nor a path that exists",
            hint=f"use {EMBEDDED_MODEL}, a folder, or a Hugging Face id such as owner/model",
        )
    cached = _cached_snapshot(name, revision)
    if cached is not None:
        return ResolvedModel(cached, name, "hub")
    if offline or _is_offline():
        raise ModelNotFoundError(
            f"{_at(name, revision)} is neither a folder here nor in the Hugging Face cache, and "
            "this is offline",
            hint="unset HF_HUB_OFFLINE to fetch it, or leave out --offline",
        )
    return pull(name, on_progress, revision=revision)


def pull(
    name: str, on_progress: ProgressCallback | None = None, *, revision: str | None = None
) -> ResolvedModel:
    """Bring a model to this machine, or bring it up to date.

    Args:
        name: As for ``resolve``; a path is only looked at.
        on_progress: Called with a stage and, when known, the part done (0 to 1).
        revision: Branch, tag or commit of a Hugging Face model.

    Raises:
        InvalidRequestError: A revision of a model that has none.
        ModelNotFoundError: No such model.
        ModelStoreError: No network, no permission, no space, or what came is not the model.
    """
    if name == EMBEDDED_MODEL:
        path = embedded_file() or fetch_embedded(on_progress or ignore_progress)
        return _without_revision(ResolvedModel(path, EMBEDDED_MODEL, "embedded"), revision)
    local = _local_path(name)
    if local is not None:
        return _without_revision(local, revision)
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(
            f"{name!r} can't be pulled: it is not a Hugging Face id",
            hint=f"use {EMBEDDED_MODEL} or owner/model",
        )
    if _is_offline():
        cached = _cached_snapshot(name, revision)
        if cached is not None:
            return ResolvedModel(cached, name, "hub")
        raise ModelStoreError(
            f"{_at(name, revision)} can't be fetched: HF_HUB_OFFLINE is set",
            hint="unset HF_HUB_OFFLINE",
        )
    folder = fetch_snapshot(name, revision, on_progress)
    if not _is_whole(folder):
        raise ModelStoreError(f"{name} came incomplete", hint="run it again")
    return ResolvedModel(folder, name, "hub")


@dataclass(frozen=True, slots=True)
class HubAccess:
    """How the Hugging Face hub would be used.

    Attributes:
        endpoint: Its address.
        offline: Whether HF_HUB_OFFLINE forbids it.
        has_token: Whether there is a token, of HF_TOKEN or of a stored login.
    """

    endpoint: str
    offline: bool
    has_token: bool


def hub_access() -> HubAccess:
    """Look at the variables and the stored login; asks nobody."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import ENDPOINT

    return HubAccess(ENDPOINT, _is_offline(), get_token() is not None)


def hub_cache_folder() -> Path:
    """The Hugging Face cache's folder; it may not exist yet."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def list_models() -> list[ModelEntry]:
    """Models that are on this machine: the embedded one and the Hugging Face cache's."""
    entries: list[ModelEntry] = []
    embedded = embedded_file()
    if embedded is not None:
        own = embedded == own_copy()
        size = embedded.stat().st_size
        entries.append(ModelEntry(EMBEDDED_MODEL, "embedded", size, embedded, removable=own))
    cache = _hub_cache()
    for repo in cache.repos if cache else ():
        revisions = [rev for rev in repo.revisions if _is_whole(rev.snapshot_path)]
        if repo.repo_type == "model" and revisions:
            newest = max(revisions, key=lambda rev: rev.last_modified)
            entries.append(
                ModelEntry(
                    repo.repo_id, "hub", repo.size_on_disk, newest.snapshot_path, removable=True
                )
            )
    return sorted(entries, key=lambda entry: (entry.kind, entry.name))


def remove(name: str) -> int:
    """Delete a model from its cache.

    Returns:
        Bytes freed.

    Raises:
        ModelNotFoundError: It is not in a cache.
        ModelStoreError: It is not ours to delete, or the system refused.
    """
    if name == EMBEDDED_MODEL:
        own = own_copy()
        if not own.is_file():
            if embedded_file() is None:
                raise ModelNotFoundError(f"{name} is not on this machine")
            raise ModelStoreError(
                f"{name} is part of the Python package {EMBEDDED_PACKAGE}",
                hint=f"pip uninstall {EMBEDDED_PACKAGE}",
            )
        size = own.stat().st_size
        with storage_errors(f"{own} can't be removed"):
            own.unlink()
        return size
    cache = _hub_cache()
    for repo in cache.repos if cache else ():
        if repo.repo_type == "model" and repo.repo_id == name:
            assert cache is not None
            with storage_errors(f"{name} can't be removed"):
                plan = cache.delete_revisions(*(rev.commit_hash for rev in repo.revisions))
                plan.execute()
            return plan.expected_freed_size
    if _local_path(name) is not None:
        raise ModelStoreError(f"{name} is a path of yours, not in a cache", hint="rm deletes files")
    raise ModelNotFoundError(f"{name} is not in a cache", hint="pagedmlx ls")


# Paths.


def _local_path(name: str) -> ResolvedModel | None:
    if not name.strip():
        raise ModelNotFoundError("the model's name is empty", hint=f"try {EMBEDDED_MODEL}")
    path = Path(os.path.expanduser(name))
    try:
        if path.is_dir():
            return ResolvedModel(path, path.resolve().name, "folder")
        if path.is_file():
            if path.suffix.lower() != ".gguf":
                raise ModelNotFoundError(
                    f"{name} is a file, but not a .gguf file", hint="give the model's folder"
                )
            return ResolvedModel(path, path.stem, "gguf")
    except OSError as error:
        raise ModelNotFoundError(f"{name!r}: {error.strerror}", hint="check the path") from error
    if name.startswith(("/", "./", "../", "~")) or name.endswith(("/", ".gguf")):
        raise ModelNotFoundError(f"{name} does not exist", hint="check the path")
    return None


# The Hugging Face cache.


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _without_revision(model: ResolvedModel, revision: str | None) -> ResolvedModel:
    if revision is not None:
        raise InvalidRequestError(
            "revision", f"{revision!r}: only models of the hub have revisions, not {model.path}"
        )
    return model


def _at(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name} at revision {revision!r}"


def _is_whole(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(path.is_file() for path in folder.glob("model*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / name).is_file() for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _cached_snapshot(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(
            name, "config.json", cache_dir=hub_cache_folder(), revision=revision
        )
    except HFValidationError:
        return None
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder is not None and _is_whole(folder) else None


def _hub_cache() -> HFCacheInfo | None:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(hub_cache_folder())
    except (CacheNotFound, ValueError):
        return None
