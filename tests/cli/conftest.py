"""Runs command lines against the fake model, in this process or in one of their own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagedmlx.cli.app import run
from tests.support import fake_llm

REPOSITORY = Path(__file__).parents[2]
WITH_FAKE = (
    "import sys\n"
    "from tests.support import fake_llm\n"
    "sys.modules['pagedmlx.llm'] = fake_llm\n"
    "from pagedmlx.cli.app import main\n"
    "main()\n"
)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in list(os.environ):
        if variable.startswith("PAGEDMLX_"):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    return str(folder)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.setitem(sys.modules, "pagedmlx.llm", fake_llm)

    def call(*arguments: object, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config" / "pagedmlx" / "config.toml"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[bytes]]:
    def begin(*arguments: object, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", WITH_FAKE, *map(str, arguments)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )

    return begin
