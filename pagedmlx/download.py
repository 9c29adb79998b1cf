"""Brings a model from the Hugging Face hub into the Hugging Face cache. No MLX in here.

The library does the transfers; this file owns which files, the order of them, room on the disk,
progress, Ctrl-C, and what the user is told when it fails.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pagedmlx.errors import (
    ModelNotFoundError,
    ModelStoreError,
    PagedMLXError,
    first_line,
    readable_bytes,
)
from pagedmlx.progress import ProgressCallback

WEIGHT_FILES = ("model*.safetensors",)
OTHER_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""What a model needs; pictures, ONNX, PyTorch pickles and the like stay where they are."""
FOLDER_FILES = ("[0-9]_Pooling/config.json",)
"""What it needs of its folders, if they are there: how embeddings are made."""
_ALL_FILES = OTHER_FILES + FOLDER_FILES + WEIGHT_FILES

_POLL_S = 0.1
_CANCEL_S = 1.0
_STALE_S = 24 * 3600.0
_KEPT = "run it again; what has arrived is kept"


def fetch_snapshot(name: str, revision: str | None, report: ProgressCallback | None) -> Path:
    """Download a model's files, those already here excepted.

    The weights come last: where they are, everything is. Ctrl-C keeps the files that are whole.

    Args:
        name: The hub's id, ``owner/model``.
        revision: Branch, tag or commit; None is the main branch.
        report: Called with a stage and the part done (0 to 1); None leaves it to the library.

    Returns:
        The snapshot's folder.

    Raises:
        ModelNotFoundError: No such model or revision, or not one that MLX loads.
        ModelStoreError: No network, no permission, or no room.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    repo = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    with _hub_errors(name, revision):
        missing = _missing_files(name, revision, repo)
        num_bytes = sum(missing.values())
        _check_room(name, num_bytes, repo)
        stage = f"fetching {name} from the Hugging Face hub ({readable_bytes(num_bytes)})"
        if not missing:
            stage = f"checking {name}, all of which is here"
        progress = _Progress(report, stage, repo, num_bytes)
        progress.tell()
        if any(_matches(file, FOLDER_FILES) for file in missing):
            _download(name, revision, FOLDER_FILES, progress)
        _download(name, revision, OTHER_FILES, progress)
        folder = _download(name, revision, WEIGHT_FILES, progress)
    _sweep(repo / "blobs")
    return folder


def _sweep(blobs: Path) -> None:
    """Remove what downloads that were killed have left."""
    for path in blobs.glob("*.incomplete"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()


def _missing_files(name: str, revision: str | None, repo: Path) -> Mapping[str, int]:
    """Names and sizes of the model's files that aren't in its snapshot yet."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(name, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = {file: size for file, size in sizes.items() if _matches(file)}
    if "config.json" not in wanted or not any(_matches(file, WEIGHT_FILES) for file in wanted):
        gguf = next((file for file in sizes if file.endswith(".gguf")), None)
        raise ModelNotFoundError(
            f"{name} has no config.json with safetensors weights",
            hint=f"download {gguf} and give its path" if gguf else "look for an MLX version",
        )
    folder = repo / "snapshots" / (info.sha or "")
    return {file: size for file, size in wanted.items() if not (folder / file).exists()}


def _matches(file: str, patterns: tuple[str, ...] = _ALL_FILES) -> bool:
    # Other forms of the model are in folders of their own; some templates are, too.
    return any(
        fnmatch.fnmatch(file, pattern)
        and ("/" not in file or "/" in pattern or pattern == "*.jinja")
        for pattern in patterns
    )


def _check_room(name: str, num_bytes: int, folder: Path) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise ModelStoreError(
            f"{name} needs {readable_bytes(num_bytes)} on the disk, and {existing} has "
            f"{readable_bytes(free)} free",
            hint="free some space, or let HF_HOME name a folder on another disk",
        )


class _Progress:
    """How much has arrived, by the size of the cache's files: libraries count in various ways."""

    def __init__(
        self, report: ProgressCallback | None, stage: str, repo: Path, num_bytes: int
    ) -> None:
        self.is_shown = report is not None
        self._report, self._stage = report, stage
        self._blobs, self._num_bytes = repo / "blobs", num_bytes
        self._before = self._size()

    def tell(self) -> None:
        if self._report is not None:
            done = (self._size() - self._before) / max(self._num_bytes, 1)
            self._report(self._stage, min(max(done, 0.0), 0.99))

    def _size(self) -> int:
        total = 0
        # Files are renamed while we look; what is written with holes counts without them.
        for path in self._blobs.glob("*"):
            try:
                status = path.stat()
            except OSError:
                continue
            total += min(status.st_size, status.st_blocks * 512)
        return total


def _download(
    name: str, revision: str | None, patterns: tuple[str, ...], progress: _Progress
) -> Path:
    """Run the library on a thread of its own, so that Ctrl-C is heard at once."""
    from huggingface_hub import snapshot_download

    cancelled = threading.Event()
    result: Future[str] = Future()

    def work() -> None:
        try:
            path = snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=[f"*/{each}" for each in patterns if each != "*.jinja"],
                tqdm_class=_cancellable_bar(cancelled, quiet=progress.is_shown),
            )
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(path)

    threading.Thread(target=work, name="pagedmlx-download", daemon=True).start()
    try:
        while not wait([result], _POLL_S).done:
            progress.tell()
    except BaseException:
        # The library removes its partial files when its threads end.
        cancelled.set()
        wait([result], _CANCEL_S)
        raise
    return Path(result.result())


def _cancellable_bar(cancelled: threading.Event, *, quiet: bool) -> type[Any]:
    """A progress bar for the library, the one thing of ours that its threads call."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            if quiet or not sys.stderr.isatty():
                settings["disable"] = True
            super().__init__(*arguments, **settings)

        def update(self, n: float | None = 1) -> bool | None:
            if cancelled.is_set():
                raise InterruptedError("the download was stopped")
            return super().update(n)

    return Bar


@contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Turn what the library raises into one line and a hint."""
    from huggingface_hub import errors, get_token

    try:
        yield
    except PagedMLXError:
        raise
    except errors.GatedRepoError as error:
        hint = "accept its terms on the hub, then set HF_TOKEN or run: hf auth login"
        if get_token():
            hint = "accept its terms on the hub with the account that your token belongs to"
        raise ModelStoreError(f"{name} asks for permission", hint=hint) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFoundError(
            f"{name} is neither a folder here nor a model on the Hugging Face hub",
            hint="check the name; a private model needs HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(
            f"{name} has no revision {revision!r}", hint="give a branch, tag or commit"
        ) from error
    except Exception as error:  # The library's HTTP client has exceptions of its own.
        raise _failure(name, error) from error


def _failure(name: str, error: Exception) -> ModelStoreError:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return ModelStoreError(f"{name} can't be fetched: the disk is full", hint=f"then {_KEPT}")
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == 401:
        return ModelStoreError(
            f"{name} can't be fetched: the hub refuses the token", hint="check HF_TOKEN"
        )
    reason = first_line(error)
    is_unreachable = isinstance(error, LocalEntryNotFoundError | ConnectionError)
    if is_unreachable or type(error).__name__ in ("ConnectError", "ConnectTimeout"):
        reason = "the Hugging Face hub can't be reached"
        return ModelStoreError(
            f"{name} can't be fetched: {reason}", hint=f"is the network there? Then {_KEPT}"
        )
    if isinstance(error, OSError) and error.strerror:
        where = f" ({os.fspath(error.filename)})" if error.filename else ""
        reason = f"{error.strerror}{where}"
    return ModelStoreError(f"{name} can't be fetched: {reason}", hint=_KEPT)
