"""The script that measures the core's own time, in a tiny form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_project import REPOSITORY


def test_a_step_takes_as_many_calls_for_each_sequence_whatever_the_pool_and_their_number(
    tmp_path: Path,
) -> None:
    """Calls are counted where seconds can't be: they are the same on any machine."""
    path = tmp_path / "report.json"
    command = [sys.executable, str(REPOSITORY / "scripts" / "bench_scheduler.py")]
    options = ("--sequences", "16,64", "--pools", "600,6000", "--runs", "1")
    done = subprocess.run(
        [*command, *options, "--json", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    rows = report["rows"]
    assert [(row["num_blocks"], row["num_sequences"], row["full"]) for row in rows] == [
        (blocks, sequences, full)
        for blocks in (600, 6000)
        for full in (False, True)
        for sequences in (16, 64)
    ]
    for row in rows:
        assert row["us"]["total"] == pytest.approx(
            sum(row["us"][phase] for phase in ("schedule", "batch", "update"))
        )
        assert row["functions"][0]["share"] >= row["functions"][-1]["share"] > 0
    calls = {(row["num_sequences"], row["full"]): row["calls"] for row in rows[:4]}
    assert calls[64, False] < calls[16, False], "what a step takes at all is shared by more"
    for row in rows[4:]:
        assert row["calls"] == pytest.approx(calls[row["num_sequences"], row["full"]], rel=0.01)
    assert report["waiting"]["num_waiting"] == 1000
    assert {"time", "machine", "versions"} <= report.keys()
