"""The scripts that measure whole models, with one that is tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_project import REPOSITORY


def run(script: str, path: Path, *options: str, code: int = 0) -> dict[str, Any]:
    command = [sys.executable, str(REPOSITORY / "scripts" / script), "--model", "mini"]
    done = subprocess.run(
        [*command, "--json", str(path), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["model"] == "mini"
    return report


def test_a_model_is_compared_with_the_reference_and_with_mlx_lm(tmp_path: Path) -> None:
    report = run(
        "bench_model.py", tmp_path / "r", "--only", "logits,cascade,stream", "--contexts", "40"
    )
    assert report["logits"]["passed"]
    assert max(report["logits"]["errors"]) < 1e-5
    assert report["cascade"]["passed"]
    row = report["stream"]["40"]
    ratio = row["pagedmlx"]["step_ms"] / row["mlx_lm"]["step_ms"]
    assert row["ratio_of_step_ms"] == pytest.approx(ratio)


def test_the_engine_is_seen_to_share_and_to_wait(tmp_path: Path) -> None:
    options = ("--scale", "0.02", "--only", "gap,warm,candidates,cascade")
    report = run("bench_engine.py", tmp_path / "r", *options)
    for row in report["gap"].values():
        for each in ("first", "again"):
            assert row[each]["prompt_tokens"] == 327
            assert row[each]["prompt_ttft_s"] > 0
        for each in row.values():
            assert 0 < each["median_ms"] <= each["longest_ms"]
            assert each["num_steps"] >= len(each["slowest_ms_and_prompt_tokens"]) > 0
    # Of 81 tokens 80 are the same, in whole blocks of 16.
    assert report["warm"]["cached_tokens"] == 80
    for row in report["candidates"].values():
        assert row["ok"]
        assert row["peak_used_blocks"] < row["eight_sequences"]


@pytest.mark.parametrize("once", [True, False])
def test_both_systems_carry_the_same_load(once: bool, tmp_path: Path) -> None:
    name, requests = (
        ("cliff", [[600, 5], [100, 5], [2, 5]]) if once else ("uneven", [[327, 2], *[[10, 2]] * 7])
    )
    more = ["--once", "--together"] if once else []
    options = ["--scale", "0.02", "--cases", name, *more]
    report = run("bench_load.py", tmp_path / "r", *options)
    assert report["loaded_together"] is once
    case = report["cases"][name]
    rounds = ["first"] if once else ["first", "again"]
    assert case["requests"] == requests
    assert list(case["pagedmlx"]) == list(case["mlx_lm"]) == rounds
    for each in rounds:
        assert case[each]["outputs_equal"] == len(requests)
        assert case[each]["times_kv_peak"] < 1
        assert ("times_one_by_one" in case[each]) is once
        found = case["pagedmlx"][each]
        assert found["num_output_tokens"] == sum(count for _, count in requests)
        assert found["counts"]["num_cached_tokens"] == 0


@pytest.mark.parametrize("together", [False, True])
def test_a_case_that_cannot_be_loaded_leaves_the_others(together: bool, tmp_path: Path) -> None:
    options = ["--scale", "0.02", "--once", "--cases", "short,uneven", "--rows", "0"]
    options += ["--together"] if together else []
    cases = run("bench_load.py", tmp_path / "r", *options, code=1)["cases"]
    assert list(cases) == ["short", "uneven"]
    assert all("max_num_batched_tokens: 0" in case["error"] for case in cases.values())
