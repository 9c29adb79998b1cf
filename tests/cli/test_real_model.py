"""The command line with the real engine and a tiny random model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from pagedmlx.cli.app import run
from tests.cli.conftest import REPOSITORY
from tests.support.tiny_models import save_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny model"
    save_tiny_folder(path)
    return path


def generate(
    capsys: pytest.CaptureFixture[str], model: Path | str, *arguments: object
) -> tuple[int, list[dict[str, Any]], str]:
    capsys.readouterr()
    code = run(["generate", str(model), *map(str, arguments), "-q", "--json", "--ignore-eos"])
    captured = capsys.readouterr()
    return code, [json.loads(line) for line in captured.out.splitlines()], captured.err


def write_prompts(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_batch_that_is_larger_than_the_pool_waits_and_finishes(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    prompts = write_prompts(
        tmp_path / "prompts.jsonl",
        *({"id": f"r{i}", "prompt": f"{i} " * 12, "max_tokens": 8} for i in range(12)),
    )
    flags = ("--num-blocks", 24, "--block-size", 8, "--check-integrity")
    code, rows, err = generate(capsys, folder, "--prompts-file", prompts, *flags)
    assert (code, err) == (0, "")
    *outputs, last = rows
    assert {row["id"] for row in outputs} == {f"r{i}" for i in range(12)}
    assert all(row["outputs"][0]["num_tokens"] == 8 for row in outputs)
    engine = last["summary"]["engine"]
    assert last["summary"]["integrity"] == "clean"
    assert engine["num_waits"] > 0
    assert engine["peak_used_blocks"] <= 24
    assert engine["max_waste_slots"] < 8


def test_what_can_never_fit_is_refused_and_the_ones_behind_it_run(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    prompts = write_prompts(
        tmp_path / "prompts.jsonl",
        {"id": "fits", "prompt": "ab", "max_tokens": 4},
        {"id": "too long", "prompt": "word " * 100, "max_tokens": 4},
        {"id": "bad token", "prompt_token_ids": [10**9], "max_tokens": 4},
        {"id": "bad role", "messages": [{"role": "banana", "content": "x"}]},
        {"id": "behind", "prompt": "cd", "max_tokens": 4},
    )
    flags = ("--num-blocks", 6, "--block-size", 8)
    code, rows, _ = generate(capsys, folder, "--prompts-file", prompts, *flags)
    assert code == 1
    found = {row["id"]: row for row in rows if "id" in row}
    assert "outputs" in found["fits"]
    assert "outputs" in found["behind"]
    for bad in ("too long", "bad token", "bad role"):
        assert found[bad]["error"]["message"]
    assert rows[-1]["summary"]["num_failed"] == 3


def test_a_prompt_longer_than_the_context_is_refused_with_the_counts(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    flags = ("--max-model-len", 64, "--num-blocks", 64)
    code, rows, err = generate(capsys, folder, "x" * 200, *flags)
    assert (code, rows) == (2, [])
    assert "64" in err.splitlines()[0]


def test_the_same_seed_gives_the_same_text(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    def texts(seed: int) -> list[str]:
        flags = ("--temp", 1, "--seed", seed, "--n", 2, "--max-tokens", 6, "--num-blocks", 32)
        capsys.readouterr()
        assert run(["generate", str(folder), "hi", "-q", "--json", *map(str, flags)]) == 0
        return [row["text"] for row in json.loads(capsys.readouterr().out)["outputs"]]

    first = texts(1)
    assert first == texts(1)
    assert first[0] != first[1]


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was asked of the network, which the libraries believe they may use."""
    asked: list[object] = []

    def refuse(_: object, address: object) -> None:
        asked.append(address)
        raise OSError("there is no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    return asked


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize(
    "spelling", ["{}", "{}/", "tiny model", "./tiny model/", "~/tiny model", "../links/link"]
)
def test_a_local_model_needs_no_network_however_it_is_spelt(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    connections: list[object],
    folder: Path,
    spelling: str,
    offline: bool,
) -> None:
    link = folder.parents[1] / "links" / "link"
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(folder)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    capsys.readouterr()
    flags = ["--max-tokens", "2", "--num-blocks", "16", "-q", "--ignore-eos"]
    assert run(["generate", spelling.format(folder), "hi", *flags]) == 0
    assert capsys.readouterr().out
    assert connections == []


@pytest.mark.parametrize("name", ["./none", "/no/such", "~/none", "owner/none", "empty"])
def test_a_model_that_is_not_here_is_told_at_once_and_offline_without_network(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    connections: list[object],
    tmp_path: Path,
    name: str,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    code, rows, err = generate(capsys, name, "hi", "--offline")
    error, hint = err.splitlines()
    assert (code, rows) == (1, [])
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert connections == []


def spoil_weights(folder: Path) -> None:
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no weights", "no weights"),
        ("no config", "config.json is missing"),
        ("no tokenizer", "no tokenizer in the folder"),
        ("cut weights", "mlx-lm can't load it"),
        ("empty", "config.json is missing"),
        ("bad gguf", "model.gguf: "),
        ("gguf inside", "has a GGUF file"),
    ],
)
def test_damaged_files_are_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: str, words: str
) -> None:
    model = tmp_path / "model"
    if fault == "bad gguf":
        model = tmp_path / "model.gguf"
        model.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    elif fault == "empty":
        model.mkdir()
    else:
        save_tiny_folder(model)
    if fault == "no weights":
        next(model.glob("*.safetensors")).unlink()
    elif fault == "no config":
        (model / "config.json").unlink()
    elif fault == "no tokenizer":
        for file in model.glob("tokenizer*"):
            file.unlink()
    elif fault == "gguf inside":
        (model / "config.json").rename(model / "m.gguf")
    elif fault == "cut weights":
        spoil_weights(model)
    code, rows, err = generate(capsys, model, "hi")
    assert (code, rows) == (1, [])
    error, *hints = err.splitlines()
    assert error.startswith("error: ")
    assert words in error
    assert all(hint.startswith("hint: ") for hint in hints)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_real_stream_with_its_exit_code(
    folder: Path, number: int, code: int
) -> None:
    arguments = [str(folder), "hi", "-q", "--ignore-eos", "--max-tokens", "900"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from pagedmlx.cli.app import main; main()", "generate", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "utf-8"},
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (code, b"")
