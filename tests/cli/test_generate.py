from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli


def test_a_prompt_is_answered_through_the_chat_template(cli: Cli, model: str) -> None:
    result = cli("generate", model, "hello there")
    assert (result.code, result.out) == (0, "USER: HELLO THERE\n")


def test_statistics_and_notes_go_to_stderr_in_one_line_each(cli: Cli, model: str) -> None:
    notes, stats = cli("generate", model, "hello").err.splitlines()
    assert notes == "BLAS: none"
    assert "2 tokens in 0.5 s, 4.0 tokens/s, the first after 0.01 s" in stats
    assert "at most 7 of 100 blocks used, waste at most 5 of 16 slots a sequence" in stats


def test_quiet_writes_nothing_but_the_answer(cli: Cli, model: str) -> None:
    result = cli("generate", model, "hello", "--quiet")
    assert (result.out, result.err) == ("USER: HELLO\n", "")


def test_a_system_message_goes_before_the_prompt(cli: Cli, model: str) -> None:
    assert cli("generate", model, "hi", "--system", "be kind").out == "SYSTEM: BE KIND USER: HI\n"


def test_raw_completes_the_bare_prompt(cli: Cli, model: str) -> None:
    assert cli("generate", model, "hi", "--raw").out == "RAW HI\n"


def test_raw_and_system_together_are_refused(cli: Cli, model: str) -> None:
    result = cli("generate", model, "hi", "--raw", "--system", "x")
    assert result.code == 2
    assert result.err.startswith("error: --system: ")


def test_a_model_without_template_completes_and_says_so(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    result = cli("generate", tmp_path / "bare", "hi")
    assert result.out == "RAW HI\n"
    assert "no chat template" in result.err


def test_a_model_without_template_refuses_a_system_message(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    result = cli("generate", tmp_path / "bare", "hi", "--system", "x")
    assert result.code == 2
    assert "needs a chat template, and this model has none" in result.err


@pytest.mark.parametrize("dash", [(), ("-",)])
def test_stdin_is_the_prompt_when_none_is_given(
    cli: Cli, model: str, dash: tuple[str, ...]
) -> None:
    assert cli("generate", model, *dash, stdin="né 漢字\n".encode()).out == "USER: NÉ 漢字\n"


def test_stdin_that_is_not_utf8_is_refused(cli: Cli, model: str) -> None:
    result = cli("generate", model, stdin=b"ab\xff")
    assert result.code == 2
    assert "stdin is not UTF-8 at byte 3" in result.err


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(cli: Cli, model: str, prompt: str) -> None:
    result = cli("generate", model, prompt)
    assert result.code == 2
    assert result.err == "error: prompt: is empty\nhint: give some text\n"


def test_with_the_model_flag_the_first_argument_is_the_prompt(cli: Cli, model: str) -> None:
    assert cli("generate", "--model", model, "hi").out == "USER: HI\n"
    assert cli("generate", "hi", "-m", model).out == "USER: HI\n"
    result = cli("generate", "-m", model, "hi", "there")
    assert result.code == 2
    assert "'there' is one too many" in result.err


def test_a_model_from_the_environment_gives_way_to_a_typed_one(
    cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDMLX_MODEL", "/nowhere")
    assert cli("generate", model, "hi").out == "USER: HI\n"
    assert "/nowhere does not exist" in cli("generate", "hi").err


def test_json_is_one_object_with_outputs_and_summary(cli: Cli, model: str) -> None:
    value = json.loads(cli("generate", model, "hi", "--json").out)
    assert value["outputs"] == [
        {
            "index": 0,
            "text": "USER: HI",
            "finish_reason": "stop",
            "stop_reason": None,
            "num_tokens": 2,
        }
    ]
    assert value["num_prompt_tokens"] == 3
    assert value["summary"]["integrity"] == "clean"
    assert value["summary"]["engine"]["peak_used_blocks"] == 7


def test_the_summary_can_go_to_a_file_or_stdout(cli: Cli, model: str, tmp_path: Path) -> None:
    target = tmp_path / "stats.json"
    value = json.loads(cli("generate", model, "hi", "--json", "--stats-json", target).out)
    assert "summary" not in value
    assert json.loads(target.read_text())["engine"]["num_blocks"] == 100
    assert [path.name for path in tmp_path.iterdir() if "stats" in path.name] == ["stats.json"]
    answer, summary = cli("generate", model, "hi", "--stats-json", "-").out.splitlines()
    assert answer == "USER: HI"
    assert json.loads(summary)["summary"]["num_prompts"] == 1


def test_several_candidates_are_told_apart(cli: Cli, model: str) -> None:
    lines = cli("generate", model, "hi", "--n", "2").out.splitlines()
    assert lines == ["--- 1 of 2 ---", "USER: HI", "--- 2 of 2 ---", "USER: HI"]


def test_markup_and_brackets_come_out_as_they_are(cli: Cli, model: str) -> None:
    text = "[00] [RED]X[/RED] [/] [LINK=A]B A\\[B"
    assert cli("generate", model, text).out == f"USER: {text}\n"


def test_sampling_flags_reach_the_request(cli: Cli, model: str) -> None:
    assert "t=0 m=256" in cli("generate", model, "SHOW").out
    out = cli("generate", model, "SHOW", "--temp", "0.5", "--max-tokens", "9").out
    assert "t=0.5 m=9" in out


@pytest.fixture
def wild(tmp_path: Path) -> str:
    """A model whose maker wants temperature 0.7 and top_k 20."""
    folder = tmp_path / "wild"
    folder.mkdir()
    return str(folder)


def test_the_models_own_sampling_is_used_where_the_user_says_nothing(
    cli: Cli, wild: str, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "t=0.7 k=20 m=256" in cli("generate", wild, "SHOW").out
    assert "t=0 k=20 m=256" in cli("generate", wild, "SHOW", "--temp", "0").out
    assert "t=0.7 m=256" in cli("generate", wild, "SHOW", "--top-k", "0").out
    monkeypatch.setenv("PAGEDMLX_TEMP", "0.3")
    assert "t=0.3 k=20 m=256" in cli("generate", wild, "SHOW").out
    config_file.write_text("top-k = 5")
    assert "t=0.3 k=5 m=256" in cli("generate", wild, "SHOW").out


def test_json_names_the_sampling_settings_that_were_used(
    cli: Cli, wild: str, tmp_path: Path
) -> None:
    value = json.loads(cli("generate", wild, "hi", "--json", "--top-k", "3").out)
    used = value["summary"]["sampling_params"]
    assert (used["temperature"], used["top_k"], used["max_tokens"]) == (0.7, 3, 256)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "SHOW"}\n{"prompt": "SHOW", "temperature": 0.1}\n')
    *rows, last = map(
        json.loads, cli("generate", wild, "--prompts-file", prompts, "--json").out.splitlines()
    )
    texts = {row["id"]: row["outputs"][0]["text"] for row in rows}
    assert texts == {"1": "USER: SHOW t=0.7 k=20 m=256", "2": "USER: SHOW t=0.1 k=20 m=256"}
    assert last["summary"]["sampling_params"]["temperature"] == 0.7


def test_variables_for_the_chat_template_reach_it(cli: Cli, model: str, tmp_path: Path) -> None:
    flags = ("--chat-template-kwargs", '{"a": 1, "b": 2}')
    assert cli("generate", model, "VARIABLES", *flags).out.endswith("{'A': 1, 'B': 2}\n")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "VARIABLES", "chat_template_kwargs": {"a": 3}}\n')
    out = cli("generate", model, "--prompts-file", prompts, *flags).out
    assert out.endswith("{'A': 3, 'B': 2}\n")


@pytest.mark.parametrize("text", ["{", "[1]", "", "null", "[" * 100_000])
def test_variables_that_are_no_json_object_are_refused(cli: Cli, model: str, text: str) -> None:
    result = cli("generate", model, "hi", "--chat-template-kwargs", text)
    assert result.code == 2
    error, hint = result.err.splitlines()
    assert error == f"error: --chat-template-kwargs: {text!r} is not a JSON object"
    assert "enable_thinking" in hint


def test_variables_without_a_template_are_refused(cli: Cli, model: str, tmp_path: Path) -> None:
    flags = ("--chat-template-kwargs", '{"a": 1}')
    (tmp_path / "bare").mkdir()
    result = cli("generate", tmp_path / "bare", "hi", *flags)
    assert "--chat-template-kwargs: needs a chat template, and this model has none" in result.err
    result = cli("generate", model, "hi", "--raw", *flags)
    assert "--chat-template-kwargs: needs the chat template, and --raw turns it off" in result.err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--temp", "nan", "--temp: nan must be at least 0"),
        ("--temp", "hot", "--temp: 'hot' is not a number"),
        ("--temp", "-1", "--temp: -1.0 must be at least 0"),
        ("--top-p", "0", "--top-p: 0.0 must be above 0"),
        ("--top-p", "1.5", "--top-p: 1.5 must be above 0 and at most 1"),
        ("--min-p", "2", "--min-p: 2.0 must be at least 0 and at most 1"),
        ("--top-k", "-2", "--top-k: -2 must be at least -1"),
        ("--max-tokens", "0", "--max-tokens: 0 must be at least 1"),
        ("--max-tokens", "1.5", "--max-tokens: '1.5' is not a whole number"),
        ("--n", "0", "--n: 0 must be between 1 and 64"),
        ("--block-size", "7", "--block-size: 7 must be one of 8, 16, 32, 64"),
        ("--num-blocks", "0", "--num-blocks: 0 must be a whole number from 1"),
        ("--kv-cache-dtype", "int8", "--kv-cache-dtype: int8 doesn't exist yet"),
        ("--attention-backend", "magic", "--attention-backend: 'magic' must be one of"),
        ("--gpu-memory-utilization", "1.1", "--gpu-memory-utilization: 1.1 must be above 0"),
        ("--kv-cache-memory", "lots", "--kv-cache-memory: 'lots' is not a number of bytes above 0"),
    ],
)
def test_a_bad_value_is_one_line_that_names_flag_value_and_limit(
    cli: Cli, model: str, flag: str, value: str, message: str
) -> None:
    result = cli("generate", model, "hi", flag, value)
    assert result.code == 2
    assert result.out == ""
    first, *hints = result.err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert all(hint.startswith("hint: ") for hint in hints)


def test_a_refused_request_is_one_line_and_a_usage_error(cli: Cli, model: str) -> None:
    result = cli("generate", model, "FAIL", "-q")
    assert (result.code, result.out) == (2, "")
    assert result.err == "error: prompt: needs 9 blocks, the pool has 8\n"


@pytest.mark.parametrize("name", ["nosuch", "no/such", "/no/such", "./no", "~/no-such", ""])
def test_a_model_that_is_nowhere_is_one_line_and_a_hint(cli: Cli, name: str) -> None:
    result = cli("generate", name, "hi")
    assert result.code == 1
    error, hint = result.err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")


def test_output_without_a_file_of_prompts_is_refused(cli: Cli, model: str) -> None:
    assert "--output: goes with --prompts-file" in cli("generate", model, "hi", "--output", "x").err
    assert cli("generate", model, "hi", "--resume").code == 2
