"""``pagedmlx doctor``: what this machine and this installation offer."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pagedmlx import __version__
from pagedmlx.cli import render
from pagedmlx.cli.settings import config_file
from pagedmlx.errors import readable_bytes

if TYPE_CHECKING:
    from pagedmlx.engine.kernel_check import KernelReport

_PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "huggingface-hub", "numpy")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Also compile some kernels and check their results.")
    ] = False,
) -> None:
    """Show the device, its limits, versions, and what doesn't work here and why."""
    import platform

    from pagedmlx import hub
    from pagedmlx.embedded import cache_folder
    from pagedmlx.engine.diagnosis import diagnose

    found = diagnose()
    report = _check_kernels() if kernels and found.problem is None else None
    versions = {name: _version(name) for name in _PACKAGES}
    access = hub.hub_access()
    folders = {
        "cache": str(cache_folder()),
        "hub_cache": str(hub.hub_cache_folder()),
        "config": str(config_file()),
    }
    if as_json:
        render.json_document(
            {
                "pagedmlx": __version__,
                "python": platform.python_version(),
                "system": platform.platform(),
                **asdict(found),
                "versions": versions,
                "hub": asdict(access),
                "folders": folders,
            }
            | ({"kernels": None if report is None else asdict(report)} if kernels else {})
        )
    else:
        lines = {
            "pagedmlx": f"{__version__}, Python {platform.python_version()}, {platform.platform()}",
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
            "device": found.device or f"none: {found.problem}",
            "memory": readable_bytes(found.memory_bytes),
            "for the device": _size(found.device_memory_bytes),
            "largest array": _size(found.max_buffer_bytes),
            "BLAS": found.blas.removeprefix("BLAS: "),
            "attention": found.attention or "none",
            "hub": f"{access.endpoint}, {'offline' if access.offline else 'online'}, "
            f"{'with a' if access.has_token else 'no'} token",
            "our cache": folders["cache"],
            "hub cache": folders["hub_cache"],
            "config file": folders["config"],
        }
        render.pairs(lines)
        for reason in found.unsupported:
            render.text(f"not here: {reason}")
        if report is not None:
            _show(report)
    if found.problem is not None:
        render.error(found.problem, "on Linux: pip install 'pagedmlx[cpu]'")
        raise typer.Exit(1)
    if report is not None and not report.ok:
        render.error(report.reason, "scripts/verify_on_mac.py makes a report to attach to an issue")
        raise typer.Exit(1)


def _check_kernels() -> KernelReport:
    from pagedmlx.engine.kernel_check import check_kernels

    return check_kernels()


def _show(report: KernelReport) -> None:
    for check in report.checks:
        # What a compiler says is of any length.
        outcome = check.problem or f"error {check.error:.1g}, {check.tolerance:.1g} allowed"
        render.text(f"kernel {'ok' if check.ok else 'WRONG'}: {check.name}: {outcome}")
    render.text(f"kernels: {report.path} should serve: {report.reason}")


def _version(name: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _size(num_bytes: int | None) -> str:
    return "no limit known" if num_bytes is None else readable_bytes(num_bytes)
