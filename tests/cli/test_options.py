from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.cli.app import command_line
from pagedmlx.cli.options import ENGINE_FLAGS, SAMPLING_FLAGS, SHARED_FLAGS, parse_size
from pagedmlx.config import EngineConfig
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import InvalidRequestError
from tests.cli.conftest import Cli
from tests.support import fake_llm


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("4G", 4 * 2**30),
        ("4g", 4 * 2**30),
        ("512MB", 512 * 10**6),
        ("512 mib", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("1TB", 10**12),
        ("64k", 65536),
        ("123", 123),
        ("123B", 123),
        (4096, 4096),
    ],
)
def test_sizes_are_read_in_the_usual_spellings(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1G", "0", "4XB", "4GiBs", "1e9", "nan", "0.2", "4 i", "4iB", "4 G B"]
)
def test_what_is_no_size_is_refused_with_the_value(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a number of bytes above 0") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert caught.value.hint


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert parse_size(text) >= 1


def test_every_engine_setting_has_a_flag() -> None:
    # The model is an argument, and --seed is the request's.
    fields = {field.name for field in dataclasses.fields(EngineConfig)} - {"model", "seed"}
    assert {flag.field for flag in ENGINE_FLAGS} == fields


def test_every_sampling_flag_fills_a_setting() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {flag.field for flag in SAMPLING_FLAGS} <= fields


def test_names_and_variables_of_flags_are_unique() -> None:
    assert len({flag.key for flag in SHARED_FLAGS}) == len(SHARED_FLAGS)
    assert len({flag.variable for flag in SHARED_FLAGS}) == len(SHARED_FLAGS)


def tokens(cli: Cli, model: str, *arguments: str) -> str:
    result = cli("generate", model, "SHOW", "-q", *arguments)
    assert result.code == 0, result.err
    return result.out.split()[-1]


def test_flag_goes_before_environment_before_config_file_before_default(
    cli: Cli, model: str, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokens(cli, model) == "m=256"
    config_file.write_text("max-tokens = 30\n")
    assert tokens(cli, model) == "m=30"
    monkeypatch.setenv("PAGEDMLX_MAX_TOKENS", "20")
    assert tokens(cli, model) == "m=20"
    assert tokens(cli, model, "--max-tokens", "10") == "m=10"


def test_every_flag_of_every_command_has_a_variable_of_its_name() -> None:
    commands = command_line().commands
    assert set(commands) == {
        *("bench", "chat", "completion", "doctor", "generate", "ls", "ps", "pull", "rm", "run"),
        "serve",
    }
    for command in commands.values():
        for option in command.params:
            if option.param_type_name == "option":
                name = next(each for each in option.opts if each.startswith("--"))
                assert option.envvar == f"PAGEDMLX_{name[2:].replace('-', '_').upper()}"


def test_a_commands_own_flags_can_be_set_in_the_environment(
    cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDMLX_SYSTEM", "be kind")
    monkeypatch.setenv("PAGEDMLX_QUIET", "1")
    monkeypatch.setenv("PAGEDMLX_JSON", "true")
    result = cli("generate", model, "hi")
    assert json.loads(result.out)["outputs"][0]["text"] == "SYSTEM: BE KIND USER: HI"
    assert result.err == ""
    assert json.loads(cli("ls").out)[0]["name"] == "smollm2"
    monkeypatch.setenv("PAGEDMLX_RAW", "maybe")
    result = cli("generate", model, "hi")
    assert result.code == 2
    assert "error: PAGEDMLX_RAW: 'maybe' is not true or false" in result.err


def test_a_commands_own_flags_can_be_set_in_the_config_file(
    cli: Cli, model: str, config_file: Path
) -> None:
    config_file.write_text(
        'system = "be kind"\nquiet = true\n[chat-template-kwargs]\nenable_thinking = false\n'
    )
    result = cli("generate", model, "VARIABLES")
    assert result.out == "SYSTEM: BE KIND USER: VARIABLES {'ENABLE_THINKING': FALSE}\n"
    assert result.err == ""
    config_file.write_text('quiet = "yes"')
    assert "quiet in the config file: 'yes' is of the wrong type" in cli("generate", model, "x").err
    config_file.write_text("system = 1")
    assert "system in the config file: 1 is of the wrong type" in cli("generate", model, "x").err
    config_file.write_text("help = true")
    assert "there is no flag of that name" in cli("generate", model, "x").err


def test_an_empty_variable_counts_as_unset(
    cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDMLX_MAX_TOKENS", "")
    assert tokens(cli, model) == "m=256"


def test_the_config_file_sets_every_kind_of_flag(cli: Cli, model: str, config_file: Path) -> None:
    config_file.write_text(
        'model = "/from/config"\nkv-cache-memory = "1GiB"\ntemp = 1\ntop_p = 0.5\n'
        'enable-prefix-caching = false\nstop = ["x", "y"]\nnum-blocks = 12\n'
    )
    result = cli("generate", model, "hi")
    assert "of 12 blocks" in result.err
    assert "/from/config does not exist" in cli("generate", "hi").err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num-block = 3", "num-block in the config file: there is no flag of that name"),
        ("[generate]\nn = 2", "generate in the config file: there is no flag of that name"),
        ('num-blocks = "3"', "num-blocks in the config file: '3' is of the wrong type"),
        ("num-blocks = true", "num-blocks in the config file: True is of the wrong type"),
        ("num-blocks = 1.5", "num-blocks in the config file: 1.5 is of the wrong type"),
        ("check-integrity = 1", "check-integrity in the config file: 1 is of the wrong type"),
        ("stop = [1]", "stop in the config file: [1] is of the wrong type"),
        ("block-size = 7", "block-size in the config file: 7 must be one of"),
        ('kv-cache-memory = "lots"', "'lots' is not a number of bytes above 0"),
        ("num-blocks = ", "is not TOML"),
    ],
)
def test_a_fault_in_the_config_file_is_told_by_name(
    cli: Cli, model: str, config_file: Path, text: str, message: str
) -> None:
    config_file.write_text(text)
    result = cli("generate", model, "hi")
    assert result.code == 2
    assert message in result.err.splitlines()[0]


def test_a_misspelt_key_gets_a_suggestion(cli: Cli, model: str, config_file: Path) -> None:
    config_file.write_text("num-block = 3")
    assert "hint: did you mean num-blocks?" in cli("generate", model, "hi").err


def test_a_broken_config_file_doesnt_stop_the_other_commands(cli: Cli, config_file: Path) -> None:
    config_file.write_text("= =")
    assert cli("ls").code == 0
    assert cli("--help").code == 0


def test_a_bad_variable_is_told_by_its_name(
    cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDMLX_BLOCK_SIZE", "7")
    assert "error: PAGEDMLX_BLOCK_SIZE: 7 must be one of" in cli("generate", model, "hi").err
    monkeypatch.setenv("PAGEDMLX_BLOCK_SIZE", "x")
    result = cli("generate", model, "hi")
    assert result.code == 2
    assert "error: PAGEDMLX_BLOCK_SIZE: 'x' is not a whole number" in result.err


def test_a_stop_string_in_a_variable_may_have_spaces(
    cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, ...]] = []

    def note(_: object, __: object, params: SamplingParams, **___: object) -> None:
        given.append(params.stop)
        raise InvalidRequestError("prompt", "was seen")

    monkeypatch.setattr(fake_llm.LLM, "stream", note)
    monkeypatch.setenv("PAGEDMLX_STOP", "own fox")
    cli("generate", model, "hi")
    cli("generate", model, "hi", "--stop", "a", "--stop", "b c")
    assert given == [("own fox",), ("a", "b c")]


def test_a_setting_that_only_the_model_can_refuse_is_told_by_its_flag(
    cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InvalidRequestError("num_blocks", "leaves no room")

    monkeypatch.setattr(fake_llm.LLM, "stream", refuse)
    assert "error: --num-blocks: leaves no room" in cli("generate", model, "hi").err
    monkeypatch.setenv("PAGEDMLX_NUM_BLOCKS", "9")
    assert "error: PAGEDMLX_NUM_BLOCKS: leaves no room" in cli("generate", model, "hi").err
