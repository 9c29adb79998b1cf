"""The package as a whole: its public names, its layers, and the folder of kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pagedmlx
from pagedmlx.errors import PagedMLXError
from pagedmlx.ops import sources

REPOSITORY = Path(__file__).parents[1]


def run_python(*arguments: str, path: Path = REPOSITORY) -> str:
    """Standard output of Python with ``path`` first on its search path."""
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=path,
        env={**os.environ, "PYTHONPATH": str(path)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_public_names_are_sorted_and_each_of_them_exists():
    # Constants, classes, then the rest: the order that ruff keeps too.
    assert pagedmlx.__all__ == sorted(
        pagedmlx.__all__, key=lambda name: (not name.isupper(), name.startswith("_"), name)
    )
    for name in pagedmlx.__all__:
        assert getattr(pagedmlx, name) is not None
    assert dir(pagedmlx) == sorted(pagedmlx.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        _ = pagedmlx.Nonsense  # pyright: ignore[reportAttributeAccessIssue]


def test_a_missing_backend_of_mlx_is_explained(monkeypatch: pytest.MonkeyPatch):
    def fail(name: str) -> None:
        raise ImportError("libmlx.so: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(pagedmlx, "import_module", fail)
    with pytest.raises(ImportError) as caught:
        _ = pagedmlx.LLM
    assert "pagedmlx[cpu]" in caught.value.__notes__[0]


@pytest.mark.parametrize(("own", "expected"), [(None, "0"), ("1", "1")])
def test_ever_new_shapes_are_no_error_of_mlx_unless_the_user_wants_one(
    own: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
):
    name = "MLX_ENABLE_CACHE_THRASHING_CHECK"
    monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    assert run_python("-c", f"import pagedmlx, os; print(os.environ[{name!r}])") == f"{expected}\n"


def test_importing_the_package_and_its_values_loads_no_heavy_library():
    code = (
        "import sys, pagedmlx; pagedmlx.SamplingParams(); pagedmlx.EngineConfig()\n"
        "heavy = {'huggingface_hub', 'mlx', 'mlx_lm', 'textual', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run_python("-c", code).strip() == "[]"


def test_the_package_runs_as_a_module():
    assert run_python("-m", "pagedmlx", "--version") == f"pagedmlx {pagedmlx.__version__}\n"


def test_imports_keep_to_the_layers():
    code = "from importlinter.cli import lint_imports_command as run; run()"
    assert "0 broken" in run_python("-c", code, "--no-cache")


def test_the_kernel_folder_is_found_and_holds_its_contract():
    assert (sources.kernel_folder() / "README.md").is_file()


def test_a_missing_kernel_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    # Another library's folder of that name is not ours.
    (tmp_path / "metal").mkdir()
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "pagedmlx" / "ops" / "sources.py"))
    with pytest.raises(PagedMLXError, match="kernels' folder is missing") as caught:
        sources.kernel_folder()
    assert str(tmp_path / "pagedmlx" / "metal") in str(caught.value)
    assert caught.value.hint


def test_the_wheel_made_from_the_sdist_brings_the_kernel_folder(tmp_path: Path):
    built, unpacked = tmp_path / "built", tmp_path / "unpacked"
    run_python("-m", "build", "--no-isolation", "--outdir", str(built), str(REPOSITORY))
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(unpacked)
    assert "pagedmlx/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "metal/"))]
    code = "from pagedmlx.ops.sources import kernel_folder; print(kernel_folder())"
    assert run_python("-c", code, path=unpacked).strip() == str(unpacked / "pagedmlx" / "metal")
