from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedmlx import __version__
from tests.cli.conftest import REPOSITORY, Cli

Start = Callable[..., subprocess.Popen[bytes]]

WAIT_S = 120.0
HEAVY = ("mlx", "mlx_lm", "transformers", "huggingface_hub", "textual", "numpy", "rich")


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out.decode(), err.decode()


def wait_for(path: Path, num_lines: int) -> None:
    for _ in range(1200):
        if path.exists() and path.read_text().count("\n") >= num_lines:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} never had {num_lines} lines")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["generate", "--help"], ["completion", "zsh"], ["--version"], []]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys, json\n"
        "from pagedmlx.cli.app import run\n"
        f"code = run({arguments!r})\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'{code} {loaded}' if code or loaded else 0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_help_names_every_command(cli: Cli) -> None:
    result = cli("--help")
    assert result.code == 0
    for command in ("generate", "pull", "ls", "rm", "doctor"):
        assert f"  {command} " in result.out


def test_version_is_the_package_version(cli: Cli) -> None:
    assert cli("--version").out == f"pagedmlx {__version__}\n"


@pytest.mark.parametrize("arguments", [("bogus",), ("generate", "--bogus"), ("pull",)])
def test_a_wrong_use_is_exit_code_2_with_one_line_and_a_hint(
    cli: Cli, arguments: tuple[str, ...]
) -> None:
    result = cli(*arguments)
    assert result.code == 2
    error, hint = result.err.splitlines()
    assert error.startswith("error: ")
    assert hint.endswith(" --help")


def test_debug_shows_the_traceback_wherever_it_stands(cli: Cli) -> None:
    for arguments in (
        ("--debug", "generate", "nosuch", "x"),
        ("generate", "nosuch", "x", "--debug"),
    ):
        assert "ModelNotFoundError" in cli(*arguments).err
    assert "Traceback" not in cli("generate", "nosuch", "x").err


def test_a_fault_of_ours_is_one_line_too(
    cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.fake_llm.LLM.stats", lambda self: 1 // 0)
    result = cli("generate", model, "x", "-q")
    assert result.code == 1
    assert "error: unexpected ZeroDivisionError: integer division" in result.err


def test_a_missing_mlx_backend_is_explained(
    cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise ImportError("libmlx.so: cannot open shared object file")

    monkeypatch.setattr("tests.support.fake_llm.LLM.__init__", fail)
    result = cli("generate", model, "x")
    assert result.code == 1
    assert "pagedmlx[cpu]" in result.err


def test_piped_stdin_is_the_prompt(start: Start, model: str) -> None:
    process = start("generate", model, "-q", stdin=subprocess.PIPE)
    out, _ = process.communicate(b"from a pipe\n", timeout=WAIT_S)
    assert (process.returncode, out) == (0, b"USER: FROM A PIPE\n")


def test_exit_codes_reach_the_shell(start: Start, model: str) -> None:
    assert finish(start("generate", "/no/such", "x"))[0] == 1
    assert finish(start("generate", model, "x", "--temp", "-1"))[0] == 2


def test_a_reader_that_leaves_is_not_an_error_message(start: Start, model: str) -> None:
    process = start("generate", model, "SLOW " * 1000, "-q")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=WAIT_S) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_stream_with_its_exit_code(
    start: Start, model: str, number: int, code: int
) -> None:
    process = start("generate", model, "SLOW " * 1000, "-q")
    assert process.stdout is not None
    process.stdout.read(5)
    process.send_signal(number)
    returned, _, err = finish(process)
    assert (returned, err) == (code, "")


def test_ctrl_c_in_a_batch_keeps_what_is_done_and_says_how_to_go_on(
    start: Start, cli: Cli, model: str, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("SLOW\n" * 400)
    target = tmp_path / "out.jsonl"
    process = start("generate", model, "--prompts-file", prompts, "--output", target)
    wait_for(target, 2)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "the same with --resume goes on" in err
    lines = target.read_text().splitlines()
    assert 2 <= len(lines) < 400
    assert all("outputs" in json.loads(line) for line in lines)


def test_prompts_are_read_as_they_are_needed(start: Start, model: str) -> None:
    process = start("generate", model, "--prompts-file", "-", "--json", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"a\nb\nc\nd\n")
    process.stdin.flush()
    # Four are in flight at most: the first row comes although the input is still open.
    assert b'"outputs"' in process.stdout.readline()
    process.stdin.close()
    assert len(process.stdout.read().splitlines()) == 4
    assert process.wait(timeout=WAIT_S) == 0
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
