from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def write(path: Path, *rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rows(text: str) -> dict[str, Any]:
    values = [json.loads(line) for line in text.splitlines()]
    return {value["id"]: value for value in values if "id" in value}


def test_every_line_of_a_text_file_is_a_prompt(cli: Cli, model: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\r\n\r\n{two}\r\nthree é".encode())
    result = cli("generate", model, "--prompts-file", path, "--json")
    assert result.code == 0
    texts = {key: row["outputs"][0]["text"] for key, row in rows(result.out).items()}
    assert texts == {"1": "USER: ONE", "3": "USER: {TWO}", "4": "USER: THREE É"}


def test_the_last_line_of_json_is_the_summary(cli: Cli, model: str, prompts: Path) -> None:
    write(prompts, {"prompt": "a"}, {"prompt": "b"})
    *_, last = cli("generate", model, "--prompts-file", prompts, "--json").out.splitlines()
    summary = json.loads(last)["summary"]
    assert (summary["num_prompts"], summary["num_failed"]) == (2, 0)
    assert summary["integrity"] == "clean"
    for key in ("num_waits", "peak_used_blocks", "max_waste_slots", "mean_fill_while_waiting"):
        assert key in summary["engine"]


def test_a_line_sets_its_own_id_settings_and_system(cli: Cli, model: str, prompts: Path) -> None:
    write(
        prompts,
        {"id": "a", "prompt": "SHOW", "temperature": 0.5, "system": "s", "stop": None},
        {"id": 7, "messages": [{"role": "user", "content": "SHOW"}], "max_tokens": 3},
        {"id": "c", "prompt_token_ids": [5, 6], "priority": 2, "cache_salt": "x"},
    )
    arguments = ("--prompts-file", prompts, "--json", "--max-tokens", "9", "--system", "all")
    found = rows(cli("generate", model, *arguments).out)
    texts = {key: row["outputs"][0]["text"] for key, row in found.items()}
    assert texts == {
        "a": "SYSTEM: S USER: SHOW t=0.5 m=9",
        "7": "USER: SHOW t=0 m=3",
        "c": "RAW 5 6",
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x"', "line 2: JSON: "),
        (b"[1]", "line 2: JSON: is not an object"),
        (b"[" * 100_000, "line 2: JSON: "),
        (b'{"prompt": "\xff"}', "line 2: text: is not UTF-8 at byte 13"),
        (b'{"prompt": ""}', "line 2: prompt: is empty"),
        (b'{"prompt": 5}', "line 2: prompt: 5 is not a string"),
        (b'{"prompt": "\\ud800"}', "line 2: prompt: has a broken character at position 1"),
        (b'{"prompt": "x", "messages": [{}]}', "it has prompt and messages"),
        (b'{"id": "z"}', "line 2: prompt: needs one of"),
        (b'{"messages": []}', "line 2: messages: is not a list with something in it"),
        (b'{"messages": ["x"]}', "line 2: messages: must hold objects"),
        (b'{"prompt_token_ids": [1.5]}', "line 2: prompt_token_ids: must hold whole numbers"),
        (b'{"prompt": "x", "temperatur": 1}', "line 2: temperatur: is not a known field"),
        (b'{"prompt": "x", "temperature": NaN}', "line 2: temperature: nan must be"),
        (b'{"prompt": "x", "max_tokens": "5"}', "line 2: max_tokens: '5' is not a whole number"),
        (b'{"prompt": "x", "stop": 1}', "line 2: stop: 1 is not a string or a list"),
        (b'{"prompt": "x", "priority": "high"}', "line 2: priority: 'high' is not of type int"),
        (b'{"prompt": "x", "id": true}', "line 2: id: True is not a name"),
        (b'{"prompt": "x", "id": "1"}', "line 2: id: '1' came before"),
        (b'{"messages": [{"role": "user"}], "system": "s"}', "line 2: system: goes with prompt"),
    ],
)
def test_a_bad_line_is_an_error_row_and_the_others_run(
    cli: Cli, model: str, prompts: Path, line: bytes, message: str
) -> None:
    prompts.write_bytes(b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    result = cli("generate", model, "--prompts-file", prompts, "--json")
    assert result.code == 1
    values = [json.loads(text) for text in result.out.splitlines()[:-1]]
    bad = [value for value in values if "error" in value]
    assert [value["line"] for value in bad] == [2]
    assert message in bad[0]["error"]["message"]
    assert len(values) == 3


def test_a_refused_request_is_an_error_row_with_its_line(
    cli: Cli, model: str, prompts: Path
) -> None:
    write(prompts, {"id": "a", "prompt": "FAIL"}, {"id": "b", "prompt": "x"})
    result = cli("generate", model, "--prompts-file", prompts, "--json")
    assert result.code == 1
    found = rows(result.out)
    assert found["a"]["line"] == 1
    assert found["a"]["error"]["type"] == "PoolTooSmallError"
    assert "outputs" in found["b"]


def test_without_json_answers_have_headings_and_errors_go_to_stderr(
    cli: Cli, model: str, prompts: Path
) -> None:
    write(prompts, {"id": "a", "prompt": "x"}, {"prompt": "FAIL"})
    result = cli("generate", model, "--prompts-file", prompts)
    assert result.out == "--- a ---\nUSER: X\n"
    assert "error: line 2: prompt: needs 9 blocks" in result.err
    assert "1 prompts done, 1 failed" in result.err


def test_raw_refuses_conversations_line_by_line(cli: Cli, model: str, prompts: Path) -> None:
    write(prompts, {"id": "a", "messages": [{"role": "user", "content": "x"}]}, {"prompt": "y"})
    found = rows(cli("generate", model, "--prompts-file", prompts, "--json", "--raw").out)
    assert "--raw turns it off" in found["a"]["error"]["message"]
    assert found["2"]["outputs"][0]["text"] == "RAW Y"


def test_prompts_can_come_from_stdin(cli: Cli, model: str) -> None:
    result = cli("generate", model, "--prompts-file", "-", "--json", stdin=b"one\ntwo\n")
    assert set(rows(result.out)) == {"1", "2"}


def test_an_empty_file_gives_only_a_summary(cli: Cli, model: str, prompts: Path) -> None:
    prompts.touch()
    result = cli("generate", model, "--prompts-file", prompts, "--json")
    assert result.code == 0
    assert json.loads(result.out)["summary"]["num_prompts"] == 0


def test_a_broken_invariant_is_told_and_fails(cli: Cli, model: str, prompts: Path) -> None:
    write(prompts, {"prompt": "BREAK"})
    result = cli("generate", model, "--prompts-file", prompts)
    assert result.code == 1
    assert "integrity broken: block 3 is in two tables" in result.err
    assert cli("generate", model, "BREAK").code == 1


def test_rows_go_to_the_output_file_and_the_summary_to_stdout(
    cli: Cli, model: str, prompts: Path, tmp_path: Path
) -> None:
    write(prompts, {"id": "a", "prompt": "x"})
    target = tmp_path / "out.jsonl"
    result = cli("generate", model, "--prompts-file", prompts, "--output", target, "--json")
    assert set(rows(target.read_text())) == {"a"}
    assert set(json.loads(result.out)) == {"summary"}


def test_an_output_that_is_there_is_not_written_over(
    cli: Cli, model: str, prompts: Path, tmp_path: Path
) -> None:
    write(prompts, {"prompt": "x"})
    target = tmp_path / "out.jsonl"
    target.write_text("precious")
    result = cli("generate", model, "--prompts-file", prompts, "--output", target)
    assert result.code == 2
    assert "--resume goes on with it" in result.err
    assert target.read_text() == "precious"


def test_resume_keeps_complete_rows_and_repairs_a_torn_one(
    cli: Cli, model: str, prompts: Path, tmp_path: Path
) -> None:
    write(prompts, *({"id": key, "prompt": key} for key in "abcd"))
    target = tmp_path / "out.jsonl"
    kept = {"id": "a", "outputs": []}
    failed = {"id": "b", "error": {"message": "m"}}
    target.write_text(f'{json.dumps(kept)}\n{json.dumps(failed)}\n{{"id": "c", "outp')
    arguments = ("--prompts-file", prompts, "--output", target, "--resume", "--json")
    result = cli("generate", model, *arguments)
    assert result.code == 0
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert lines[0] == kept
    assert sorted(line["id"] for line in lines) == ["a", "b", "c", "d"]
    summary = json.loads(result.out)["summary"]
    assert (summary["num_prompts"], summary["num_skipped"]) == (3, 1)
    assert [path.name for path in tmp_path.glob(".out*")] == []
    assert json.loads(cli("generate", model, *arguments).out)["summary"]["num_skipped"] == 4


def test_resume_refuses_a_file_that_is_not_ours(
    cli: Cli, model: str, prompts: Path, tmp_path: Path
) -> None:
    write(prompts, {"prompt": "x"})
    target = tmp_path / "notes.txt"
    target.write_text("my notes\n")
    arguments = ("--prompts-file", prompts, "--output", target, "--resume")
    result = cli("generate", model, *arguments)
    assert result.code == 2
    assert "line 1 is not a row of this command" in result.err
    assert target.read_text() == "my notes\n"
    assert [path.name for path in tmp_path.glob(".notes*")] == []


def test_resume_refuses_the_file_of_prompts(cli: Cli, model: str, prompts: Path) -> None:
    write(prompts, {"id": "a", "prompt": "x"})
    before = prompts.read_text()
    result = cli("generate", model, "--prompts-file", prompts, "--output", prompts, "--resume")
    assert result.code == 2
    assert "line 1 is not a row of this command" in result.err
    assert prompts.read_text() == before


def test_resume_leaves_what_is_no_regular_file_as_it_is(
    cli: Cli, model: str, prompts: Path, tmp_path: Path
) -> None:
    write(prompts, {"prompt": "x"})
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = cli("generate", model, "--prompts-file", prompts, "--output", pipe, "--resume")
    assert result.code == 2
    assert "pipe is not a regular file" in result.err
    assert pipe.is_fifo()


def test_a_row_with_an_unknown_field_keeps_its_id(cli: Cli, model: str, prompts: Path) -> None:
    write(prompts, {"id": "a", "prompt": "x", "temperatur": 1})
    row = json.loads(cli("generate", model, "--prompts-file", prompts, "--json").out.split("\n")[0])
    assert row["id"] == "a"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--prompts-file", "/no/such"), 2, "--prompts-file: /no/such: No such file"),
        (("--prompts-file", "/"), 2, "--prompts-file: /: Is a directory"),
        (("--prompts-file", "{file}", "--output", "/no/such/out"), 1, "/no/such is not a folder"),
        (("--prompts-file", "{file}", "--output", "/"), 2, "--output: / is a folder"),
        (("hi", "--stats-json", "/no/such/stats"), 1, "/no/such is not a folder"),
        (("--prompts-file", "{file}", "--resume"), 2, "--resume: needs --output"),
        (("a prompt", "--prompts-file", "{file}"), 2, "PROMPT: there is --prompts-file too"),
    ],
)
def test_files_that_cannot_be_used_are_told_before_the_model_loads(
    cli: Cli, prompts: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    write(prompts, {"prompt": "x"})
    filled = [argument.format(file=prompts) for argument in arguments]
    result = cli("generate", "/model/that/is/not/there", *filled)
    assert result.code == code
    assert message in result.err
