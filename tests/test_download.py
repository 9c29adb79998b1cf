"""Downloads by the real client library from a hub on this machine."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from pagedmlx import download, embedded, hub
from pagedmlx.cli.app import run
from pagedmlx.errors import ModelNotFoundError, ModelStoreError, PagedMLXError
from tests.support.fake_hub import SHA, FakeHub
from tests.support.tiny_models import save_tiny_folder

REPOSITORY = Path(__file__).parents[1]
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}" * 50,
    "chat_template.jinja": b"x",
    "additional_chat_templates/tools.jinja": b"y",
    "model-00001-of-00002.safetensors": b"1" * 300_000,
    "model-00002-of-00002.safetensors": b"2" * 200_000,
    "model.safetensors.index.json": (
        b'{"weight_map": {"a": "model-00001-of-00002.safetensors",'
        b' "b": "model-00002-of-00002.safetensors"}}'
    ),
}
OTHERS = {
    "README.md": b"#",
    "cat.png": b"x" * 900,
    "pytorch_model.bin": b"x" * 900,
    "consolidated.safetensors": b"x" * 900,
    "onnx/config.json": b"{}",
    "original/tokenizer.model": b"x",
    "unet/model.safetensors": b"x",
}


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with FakeHub() as server:
        server.files = {**OTHERS, **FILES}
        yield server


@pytest.fixture
def cache(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder; in this process the library talks to the server."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "hub"


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library tries again after a second, five times."""
    monkeypatch.setattr(time, "sleep", lambda _: None)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def find(cache: Path, pattern: str) -> list[Path]:
    """Files of that name; none while folders come and go under our feet."""
    with suppress(FileNotFoundError):
        return list(cache.rglob(pattern))
    return []


def partial_files(cache: Path) -> list[Path]:
    return find(cache, "*.incomplete")


def test_only_model_shaped_files_come_and_the_weights_last(server: FakeHub, cache: Path) -> None:
    found = hub.resolve("owner/model")
    assert names(found.path) == set(FILES)
    assert all((found.path / name).read_bytes() == data for name, data in FILES.items())
    assert set(server.fetched[-2:]) == set(list(FILES)[4:6])
    (entry,) = hub.list_models()
    assert (entry.name, entry.path) == ("owner/model", found.path)


def test_the_file_that_tells_how_embeddings_are_made_comes_too(
    server: FakeHub, cache: Path
) -> None:
    server.files |= {
        "modules.json": b"[]",
        "1_Pooling/config.json": b"{}",
        "2_Normalize/weights.bin": b"x",
        "onnx/1_Pooling/config.json": b"{}",
    }
    found = hub.resolve("owner/model")
    assert names(found.path) == {*FILES, "modules.json", "1_Pooling/config.json"}
    assert all(file.endswith(".safetensors") for file in server.fetched[-2:])


def test_what_is_here_is_found_without_a_request(server: FakeHub, cache: Path) -> None:
    found = hub.resolve("owner/model")
    server.private = True
    assert hub.resolve("owner/model") == found
    assert hub.resolve("owner/model", offline=True) == found


def test_a_pull_brings_a_model_up_to_date_and_says_when_it_is(server: FakeHub, cache: Path) -> None:
    hub.pull("owner/model")
    server.fetched.clear()
    told: list[str] = []
    hub.pull("owner/model", lambda stage, _: told.append(stage))
    assert server.fetched == []
    assert set(told) == {"checking owner/model, all of which is here"}


@pytest.mark.parametrize("revision", ["v1", SHA])
def test_a_revision_is_fetched_and_found_by_its_name(
    server: FakeHub, cache: Path, revision: str
) -> None:
    found = hub.resolve("owner/model", revision)
    assert found.path.name == SHA
    assert hub.resolve("owner/model", revision, offline=True) == found
    with pytest.raises(ModelNotFoundError, match="owner/model at revision 'v2' is neither"):
        hub.resolve("owner/model", "v2", offline=True)


def test_progress_tells_the_size_and_the_part_that_is_done(server: FakeHub, cache: Path) -> None:
    told: list[tuple[str, float | None]] = []
    hub.resolve("owner/model", on_progress=lambda stage, part: told.append((stage, part)))
    stages, parts = zip(*told, strict=True)
    assert set(stages) == {"fetching owner/model from the Hugging Face hub (488.5 KiB)"}
    assert all(0.0 <= part < 1.0 for part in parts)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("spoil", "kind", "words", "hint"),
    [
        ({"gated": True}, ModelStoreError, "asks for permission", "hf auth login"),
        ({"private": True}, ModelNotFoundError, "neither a folder here nor", "HF_TOKEN"),
        ({"broken": {"tokenizer.json"}}, ModelStoreError, "can't be fetched: ", "is kept"),
        ({"files": {"config.json": b"{}", "m.bin": b"x"}}, ModelNotFoundError, "no config", "MLX"),
        ({"files": {"m-Q4.gguf": b"x"}}, ModelNotFoundError, "no config.json", "m-Q4.gguf"),
    ],
)
def test_a_hub_that_refuses_is_one_line_and_a_hint_and_nothing_is_listed(
    server: FakeHub,
    cache: Path,
    spoil: dict[str, Any],
    kind: type[PagedMLXError],
    words: str,
    hint: str,
) -> None:
    for name, value in spoil.items():
        setattr(server, name, value)
    with pytest.raises(kind, match=words) as caught:
        hub.resolve("owner/model")
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)
    assert hub.list_models() == []
    assert partial_files(cache) == []


def test_a_revision_that_is_not_there_is_named(server: FakeHub, cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="owner/model has no revision 'v9'"):
        hub.resolve("owner/model", "v9")


@pytest.mark.parametrize("stored", [False, True])
def test_the_token_is_sent_and_a_gate_that_stays_shut_says_whose(
    server: FakeHub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    if stored:
        (tmp_path / "token").write_text("hf_secret")
    else:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.gated = True
    with pytest.raises(ModelStoreError) as caught:
        hub.resolve("owner/model")
    assert server.tokens == {"Bearer hf_secret"}
    assert "the account that your token belongs to" in caught.value.hint
    assert "secret" not in str(caught.value) + caught.value.hint


def test_a_hub_out_of_reach_is_told(
    server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelStoreError, match="the Hugging Face hub can't be reached") as caught:
        hub.resolve("owner/model")
    assert caught.value.hint


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_download_that_broke_goes_on_with_the_files_that_are_missing_or_is_removed(
    server: FakeHub, cache: Path, is_given_up: bool
) -> None:
    server.broken = {"model-00002-of-00002.safetensors"}
    with pytest.raises(ModelStoreError, match="owner/model can't be fetched"):
        hub.resolve("owner/model")
    assert hub.list_models() == []
    with pytest.raises(ModelNotFoundError):
        hub.resolve("owner/model", offline=True)
    if is_given_up:
        assert hub.remove("owner/model") > 300_000
        assert not list(cache.rglob("*.safetensors"))
        return
    server.broken.clear()
    server.fetched.clear()
    found = hub.resolve("owner/model")
    assert server.fetched == ["model-00002-of-00002.safetensors"]
    assert names(found.path) == set(FILES)


def test_too_little_room_is_told_with_the_numbers_before_anything_is_fetched(
    server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(cache.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ModelStoreError, match=r"needs 488\.5 KiB .* has 1000 B free") as caught:
        hub.resolve("owner/model")
    assert "HF_HOME" in caught.value.hint
    assert server.fetched == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), "the disk is full"),
        (OSError(errno.EACCES, "Permission denied", "/c"), r"Permission denied \(/c\)"),
        (RuntimeError("first\nsecond"), "first"),
    ],
)
def test_a_system_that_refuses_is_one_line_and_a_hint(
    server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelStoreError, match=f"can't be fetched: {words}$") as caught:
        hub.resolve("owner/model")
    assert caught.value.hint.endswith("what has arrived is kept")


def pull(server: FakeHub, cache: Path, prelude: str = "") -> subprocess.Popen[str]:
    """The command in a process of its own."""
    code = f"{prelude}\nfrom pagedmlx.cli.app import main\nmain()\n"
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(cache.parent)}
    environment |= {"HF_HUB_OFFLINE": "0", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-c", code, "pull", "owner/model"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_a_model_comes_answers_and_answers_offline(
    server: FakeHub, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_folder(tmp_path / "tiny")
    server.files = {**OTHERS, **{path.name: path.read_bytes() for path in folder.iterdir()}}
    flags = ("--max-tokens", "2", "--num-blocks", "16", "--json")
    answers = []
    for more in ((), ("--offline",)):
        code = run(["generate", "owner/model", "hi", *flags, *more])
        out, err = capsys.readouterr()
        assert code == 0, err
        assert ("fetching owner/model" in err) == (not more)
        answers.append(json.loads(out)["outputs"])
    assert answers[0] == answers[1]


def test_a_fault_of_a_model_of_the_hub_is_told_by_the_models_name(
    server: FakeHub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["tokenizer.json"] = b"{"
    assert run(["generate", "owner/model", "hi"]) == 1
    err = capsys.readouterr().err
    assert "error: owner/model: config.json has model_type None" in err
    assert SHA not in err


def wait_until(condition: Callable[[], object]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it never came")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_download_ends_it_lists_nothing_and_keeps_whole_files(
    server: FakeHub, cache: Path, number: int, code: int
) -> None:
    server.stuck = {"model-00002-of-00002.safetensors"}
    process = pull(server, cache)
    wait_until(lambda: find(cache, "model-00001*") and partial_files(cache))
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (code, "")
    assert err.splitlines()[-1] == "stopped; run it again, what has arrived is kept"
    assert hub.list_models() == []
    server.stuck.clear()
    server.fetched.clear()
    process = pull(server, cache)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out.startswith("owner/model is here: ")) == (0, True), err
    assert server.fetched == ["model-00002-of-00002.safetensors"]


def test_a_signal_in_a_running_transfer_leaves_no_partial_file(
    server: FakeHub, cache: Path
) -> None:
    server.slow = {"model-00002-of-00002.safetensors"}
    chunks = "from huggingface_hub import constants\nconstants.DOWNLOAD_CHUNK_SIZE = 1000"
    process = pull(server, cache, chunks)
    wait_until(lambda: find(cache, "model-00001*") and partial_files(cache))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    process.communicate()
    assert partial_files(cache) == []


def test_old_partial_files_are_swept_when_a_model_has_come(server: FakeHub, cache: Path) -> None:
    blobs = cache / "models--owner--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "old.incomplete").touch()
    (blobs / "new.incomplete").touch()
    os.utime(blobs / "old.incomplete", (0, 0))
    hub.resolve("owner/model")
    assert partial_files(cache) == [blobs / "new.incomplete"]


def test_a_file_that_the_system_does_not_let_grow_leaves_nothing_half(
    server: FakeHub, cache: Path
) -> None:
    limit = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, 250_000))"
    process = pull(server, cache, limit)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "error: owner/model can't be fetched: File too large" in err
    assert partial_files(cache) == []
    assert hub.list_models() == []


def test_the_partial_files_are_not_counted_with_their_holes(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    progress = download._Progress(None, "x", tmp_path, 100)
    with open(tmp_path / "blobs" / "a", "wb") as file:
        file.truncate(1 << 30)
    assert progress._size() < 1 << 20
