from __future__ import annotations

import subprocess
import sys

_NO_MLX = "assert not [name for name in sys.modules if name.split('.')[0] == 'mlx']"


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_one_line_says_which_blas_and_no_mlx_is_imported() -> None:
    out = run(
        f"from pagedmlx.models.blas import load_fast_blas\nprint(load_fast_blas())\n{_NO_MLX}"
    )
    assert out.startswith("BLAS: ")
    assert len(out.splitlines()) == 1


def test_a_second_call_after_mlx_still_names_what_was_loaded() -> None:
    first, second = run(
        "from pagedmlx.models.blas import load_fast_blas\n"
        "print(load_fast_blas())\nimport mlx.core\nprint(load_fast_blas())"
    ).splitlines()
    if "(lib" in first:
        assert second == first
    else:
        assert second.startswith("BLAS: ")


def test_without_a_fast_blas_the_line_says_how_to_get_one() -> None:
    out = run(
        "import ctypes\n"
        "def fail(*args, **kwargs):\n    raise OSError\n"
        "ctypes.CDLL = fail\n"
        "from pagedmlx.models.blas import load_fast_blas\nprint(load_fast_blas())"
    )
    if sys.platform == "linux":
        assert "slow" in out
        assert "libopenblas0-pthread" in out
    else:
        assert "system" in out
