"""The clang inside the package ziglang, and compiled results kept by what went into them."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import threading
from importlib import metadata, util
from pathlib import Path

SHIM = Path(__file__).with_name("shim")
# Threads that check at once share one precompiled shim.
_SHIM = threading.Lock()
_ZIG = "zig.exe" if os.name == "nt" else "zig"


@functools.cache
def _zig() -> str:
    spec = util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("ziglang is not installed; scripts/test installs it with the extra dev")
    return str(Path(spec.submodule_search_locations[0]) / _ZIG)


def run_clang(
    flags: list[str], source: str, language: str = "c++"
) -> subprocess.CompletedProcess[str]:
    """Run clang on `source`, a text that it reads from its input."""
    command = [_zig(), "clang", "-x", language, "-nostdinc", "-I", str(SHIM), *flags, "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False)


def shim_flags(*flags: str) -> tuple[str, ...]:
    """The flags, and the shim read in beforehand: half of clang's time otherwise."""
    with _SHIM:
        return _shim_flags(*flags)


@functools.cache
def _shim_flags(*flags: str) -> tuple[str, ...]:
    # clang refuses a precompiled header whose files lie elsewhere or were touched since.
    files = [(str(path), str(path.stat().st_mtime_ns)) for path in sorted(SHIM.iterdir())]
    path = cached_path(".pch", *flags, *(part for file in files for part in file))
    if not path.exists():
        part = path.with_name(f"{path.stem}-{os.getpid()}.pch")
        made = run_clang([*flags, "-o", str(part)], '#include "simd.h"', "c++-header")
        if made.returncode:
            raise RuntimeError(made.stderr)
        part.replace(path)
    return (*flags, "-include-pch", str(path))


def link_shared(objects: list[Path], target: Path) -> None:
    """Link objects to a library whose C functions come from the process that loads it."""
    if platform.system() == "Darwin":
        command = ["cc", "-dynamiclib", "-undefined", "dynamic_lookup"]
    else:
        command = [_zig(), "ld.lld", "-shared"]
    subprocess.run([*command, *map(str, objects), "-o", str(target)], check=True)


@functools.cache
def _cache_key() -> bytes:
    digest = hashlib.blake2b(metadata.version("ziglang").encode())
    for path in sorted(SHIM.iterdir()):
        digest.update(path.read_bytes())
    return digest.digest()


def cached_path(suffix: str, *parts: str) -> Path:
    """Where the result of compiling `parts` with today's shim belongs; it may not exist yet."""
    folder = Path(tempfile.gettempdir()) / f"pagedmlx-metal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user")
    digest = hashlib.blake2b(_cache_key() + sys.platform.encode(), digest_size=16)
    for part in parts:
        digest.update(part.encode() + b"\0")
    return folder / f"{digest.hexdigest()}{suffix}"
