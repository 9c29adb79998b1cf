"""``scripts/verify_on_mac.py``: no part takes another along, and what it says is what happened."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagedmlx.kv.layout import AxisOrder
from pagedmlx.ops.base import AttentionParams
from scripts import check_kernels, verify_on_mac
from scripts.verify_on_mac import NEEDS_GPU, Part, parts, run, verify
from tests.metal.launcher import FiberLauncher

SCRIPT = Path(__file__).parents[1] / "scripts" / "verify_on_mac.py"


def script(code: str, **options: object) -> Part:
    return Part("part", ("-c", f"import json, os, sys, time\n{code}"), on_gpu=False, **options)  # type: ignore[arg-type]


def outcome(part: Part, seconds: float = 60) -> dict[str, object]:
    return run(part, time.monotonic() + seconds)


def test_the_report_says_what_was_found_and_where(tmp_path: Path):
    target = tmp_path / "report.json"
    result = subprocess.run(
        [sys.executable, SCRIPT, "--only", "operations", "--json", target],
        capture_output=True,
        text=True,
    )
    report = json.loads(target.read_text())
    assert (result.returncode, report["ok"], report["failed"]) == (0, True, []), result.stderr
    device, operations = report["parts"]
    assert device["result"]["device"] == report["mlx"]
    assert operations["result"]["pool"]["ok"]
    assert report["mlx"]["mlx_device"]
    assert report["versions"]["mlx"]


def test_without_a_gpu_kernels_are_reported_to_need_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pretend(monkeypatch, gpu=None)
    chosen = [Part("token", ("-c", "raise SystemExit(1)")), script("print('{}')")]
    report = verify(chosen, minutes=1)
    assert (report["ok"], report["failed"], report["skipped"]) == (True, [], ["token"])
    assert report["parts"][1] == {"name": "token", "ok": None, "skipped": NEEDS_GPU}
    assert f"token: {NEEDS_GPU}" in capsys.readouterr().err


def pretend(monkeypatch: pytest.MonkeyPatch, gpu: str | None) -> None:
    found = json.dumps({"device": {"gpu": gpu}})
    part = Part("device", ("-c", f"print({found!r})"), on_gpu=False)
    monkeypatch.setattr(verify_on_mac, "DEVICE", part)


def test_an_unknown_part_is_refused_and_the_names_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["verify", "--only", "token,nonsense"])
    with pytest.raises(SystemExit) as caught:
        verify_on_mac.main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "no part nonsense" in error
    assert "token one by one" in error


def test_the_result_of_a_part_is_kept_without_what_the_report_has_once():
    found = outcome(script("print(json.dumps({'versions': {}, 'errors': [1]}))"))
    assert found["ok"] is True
    assert found["result"] == {"errors": [1]}
    assert "error" not in found


def test_a_part_that_fails_keeps_its_result_and_its_last_words():
    found = outcome(script("print('{\"bad\": 1}'); print('why', file=sys.stderr); sys.exit(1)"))
    assert found["ok"] is False
    assert found["result"] == {"bad": 1}
    assert (found["error"], found["stderr"]) == ("exit code 1", "why")


@pytest.mark.parametrize(
    ("code", "error", "stderr"),
    [
        ("os.abort()", "exit code -6", ""),  # as MLX does when the GPU reports an error
        ("print('no json')", "wrote no JSON", ""),
        ("raise ValueError('boom')", "exit code 1", "ValueError: boom"),
    ],
)
def test_a_part_that_breaks_off_is_a_failure_with_a_reason(
    capsys: pytest.CaptureFixture[str], code: str, error: str, stderr: str
):
    found = outcome(script(code))
    assert (found["ok"], found["error"]) == (False, error)
    assert str(found["stderr"]).endswith(stderr)
    assert f"{error}; {stderr}" in capsys.readouterr().err


def test_the_report_does_not_say_whose_machine_it_was():
    home = str(Path.home())
    code = (
        f"print(json.dumps({{'path': {home + '/model'!r}}})); print('in {home}/x', file=sys.stderr)"
    )
    found = outcome(script(f"{code}; sys.exit(1)"))
    assert home not in json.dumps(found)
    assert "~/x" in str(found["stderr"])


def test_a_part_that_hangs_ends_with_the_processes_it_started():
    code = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, file=sys.stderr, flush=True)\n"
        "time.sleep(600)"
    )
    found = outcome(script(code, minutes=1 / 15))
    assert found["ok"] is False
    assert found["error"] == "not done after 4 s"
    child = str(found["stderr"])
    for _ in range(600):
        if not is_running(int(child)):
            break
        time.sleep(0.1)
    assert not is_running(int(child))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    # A process that nobody waited for is still listed.
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def test_one_failure_loses_no_other_part(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, gpu="metal")
    chosen = [
        Part("dies", ("-c", "import os; os.abort()")),
        Part("works", ("-c", "print('{}')")),
        Part(
            "sees",
            ("-c", "import os; print('{\"seen\": ' + os.environ['SEEN'] + '}')"),
            environment=(("SEEN", "7"),),
        ),
    ]
    report = verify(chosen, minutes=1)
    assert report["ok"] is False
    assert report["failed"] == ["dies"]
    assert report["skipped"] == []
    assert [part["ok"] for part in report["parts"]] == [True, False, True, True]
    assert report["parts"][-1]["result"] == {"seen": 7}


def test_a_part_for_which_no_time_is_left_has_failed():
    found = outcome(script("print('{}')"), seconds=0)
    assert (found["ok"], found["error"]) == (False, "no time was left for it")


def test_every_check_runs_once_more_with_one_operation_in_a_command_buffer():
    every = {part.name: part for part in parts("smollm2")}
    again = {name: part for name, part in every.items() if name.endswith(" one by one")}
    assert {"token one by one", "kernels one by one", "parity one by one"} <= set(again)
    for name, part in again.items():
        assert part.command == every[name.removesuffix(" one by one")].command
        assert dict(part.environment) == {"MLX_MAX_OPS_PER_BUFFER": "1"}


SCRIPTS = sorted({part.command[0] for part in parts("smollm2")} - {"-m"})


@pytest.mark.parametrize("path", SCRIPTS)
def test_options_and_sections_of_every_part_exist(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    root = SCRIPT.parents[1]
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(root / path), run_name="__main__")
    assert not ended.value.code
    told = capsys.readouterr().out
    source = (root / path).read_text()
    for command in (part.command for part in parts("smollm2") if part.command[0] == path):
        assert all(word in told for word in command if word.startswith("--"))
        if "--only" in command:
            sections = command[command.index("--only") + 1].split(",")
            assert all(f'        "{section}": ' in source for section in sections)


@pytest.mark.parametrize("order", AxisOrder)
def test_the_check_of_copies_passes_right_kernels_and_no_others(order: AxisOrder):
    assert check_kernels.copies_are_equal(FiberLauncher(), "float16", order)
    still = FiberLauncher(
        change=lambda kernel, source: (
            source.replace("pairs[2 * pair];", "pairs[2 * pair + 1];")
            if "copy_blocks" in kernel.name
            else source
        )
    )
    assert not check_kernels.copies_are_equal(still, "float16", order)


@pytest.mark.parametrize("path", ["kernel", "gather", "written"])
def test_the_check_of_prefill_passes_right_kernels(path: str):
    params = AttentionParams(scale=0.125, window=40)
    spans = check_kernels.CHUNKS[:3]
    share = check_kernels.prefill_share(
        FiberLauncher(), path, "float16", (64, 64), 3, params, spans
    )
    assert share < 1
