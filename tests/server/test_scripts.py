"""The scripts that soak and fuzz the server, in a tiny form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.test_project import REPOSITORY


def run(script: str, report: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(REPOSITORY / "scripts" / script), *options]
    done = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(report.read_text())


def test_clients_on_a_small_pool_get_the_answers_that_they_would_get_alone(tmp_path: Path):
    options = ("--clients", "12", "--minutes", "0.05", "--cases", "16")
    report = run("soak_server.py", tmp_path / "soak.json", *options)
    assert report["passed"]
    assert report["answers"] > 0
    assert report["left"]


def test_hostile_requests_leave_nothing_behind(tmp_path: Path):
    report = run("fuzz_server.py", tmp_path / "fuzz.json", "--requests", "120")
    assert report["passed"]
    assert report["machine"]


def test_agents_are_answered_and_their_prompts_are_cached(tmp_path: Path):
    report = run(
        "replay_agents.py", tmp_path / "agents.json", "--model", "thinking", "--turns", "3"
    )
    assert report["passed"]
    assert len(report["agents"]) == 4
    for agent in report["agents"]:
        assert agent["hits"] >= 0.9
        assert agent["turns"][1]["cached_tokens"] >= 0.9 * agent["turns"][0]["prompt_tokens"]
