"""The script that lets pagedmlx and mlx-lm take turns, in a tiny form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.tiny_models import save_tiny_folder
from tests.test_project import REPOSITORY


def test_both_systems_take_turns_and_say_the_same(tmp_path: Path) -> None:
    model, path = tmp_path / "tiny", tmp_path / "report.json"
    save_tiny_folder(model, "llama")
    command = [sys.executable, str(REPOSITORY / "scripts" / "bench_batch.py")]
    options = ("--cases", "uneven", "--scale", "0.1", "--uneven-pairs", "2", "--model", str(model))
    done = subprocess.run(
        [*command, *options, "--json", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    turns = [line.split(":")[0] for line in done.stderr.splitlines() if "tokens/s" in line]
    assert turns[:4] == [
        *("uneven, pagedmlx", "uneven, mlx-lm"),
        *("uneven, mlx-lm", "uneven, pagedmlx"),
    ]
    found = json.loads(path.read_text())["cases"]["uneven"]
    assert found["requests"] == [[150, 3], *[[6, 3]] * 7]
    assert len(found["quotients"]) == 2
    assert found["outputs_equal_mlx_lm"] == found["num_outputs"] == 8
    assert found["kv_peak_quotient"] < 1
