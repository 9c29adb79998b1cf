from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
import pagedmlx.core
for module in pkgutil.iter_modules(pagedmlx.core.__path__):
    importlib.import_module(f"pagedmlx.core.{module.name}")
heavy = {"mlx", "mlx_lm", "transformers", "tokenizers", "torch"} & set(sys.modules)
foreign = {
    name for name in sys.modules
    if name.startswith("pagedmlx.") and not name.startswith(("pagedmlx.core", "pagedmlx.config"))
} - {"pagedmlx.errors"}
assert not heavy, heavy
assert not foreign, foreign
"""


def test_the_whole_core_imports_without_mlx_or_any_other_part_of_the_package() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
