from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.support.engines import make_engine
from tests.support.server import MODEL, serving

SMALL = ("--input-len", "8", "--output-len", "4")


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    import pagedmlx.engine.load as load

    monkeypatch.setattr(load, "load_engine", lambda config, report: make_engine())


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize(
    ("kind", "flags", "shown"),
    [
        ("latency", ("--runs", "2"), "2 requests, 8 tokens out"),
        ("throughput", ("--num-prompts", "3"), "3 requests, 12 tokens out in"),
        ("prefix", ("--prefix-len", "16", "--groups", "1"), "warm TTFT is"),
    ],
)
def test_a_model_is_measured_and_the_report_says_on_what(
    cli: Cli, model: str, tmp_path: Path, kind: str, flags: tuple[str, ...], shown: str
) -> None:
    target = tmp_path / "report.json"
    result = cli("bench", kind, model, *SMALL, *flags, "--json", target)
    assert result.code == 0, result.err
    assert shown in result.out
    assert "time to first token, ms" in result.out
    report = json.loads(target.read_text())
    assert report["benchmark"] == kind
    assert report["model"] == model
    assert report["workload"]["output_len"] == 4
    assert {"machine", "versions", "config", "notes"} <= report.keys()


@pytest.mark.usefixtures("fake_engine")
def test_the_report_alone_goes_to_stdout_when_asked(cli: Cli, model: str) -> None:
    result = cli("bench", "throughput", "-m", model, *SMALL, "--num-prompts", "2", "--json", "-")
    assert json.loads(result.out)["num_requests"] == 2


def test_an_endpoint_is_measured_at_each_rate(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    with serving() as server:
        flags = ("--url", server.url, "--rates", "40,inf", "--num-prompts", "3", "--json", target)
        result = cli("bench", "serve", *SMALL, *flags)
    assert result.code == 0, result.err
    heading, first, second = result.out.splitlines()[1:4]
    assert heading.split()[:3] == ["asked", "done", "goodput"]
    assert first.split()[0] == "40"
    assert second.startswith("all at once")
    report = json.loads(target.read_text())
    assert report["model"] == MODEL
    assert [run["rate_per_s"] for run in report["rates"]] == [40.0, None]
    assert report["bounds"] == {"ttft_s": 2.0, "itl_s": 0.25}


def test_an_endpoint_that_refuses_everything_is_a_failure_with_a_reason(cli: Cli) -> None:
    with serving() as server:
        flags = ("--url", server.url, "--rates", "inf", "--num-prompts", "1", "-m", "other")
        result = cli("bench", "serve", *SMALL, *flags)
    assert result.code == 1
    assert "every request failed: status 404" in result.err
    assert "hint: --no-ignore-eos" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("latency", "--runs", "0"), "--runs: 0 must be at least 1"),
        (("latency", "--warm", "-1"), "--warm: -1 must be at least 0"),
        (("throughput", "--input-len", "0"), "--input-len: 0 must be at least 1"),
        (("throughput", "--spread", "9"), "--spread: 9.0 must be from 0 to 3"),
        (("prefix", "--groups", "0"), "--groups: 0 must be at least 1"),
        (("prefix", "--block-size", "7"), "--block-size: 7 must be one of"),
        (("serve", "--rates", "fast"), "--rates: 'fast' is no list of numbers above 0"),
        (("serve", "--rates", "1,0"), "--rates: '1,0' is no list of numbers above 0"),
        (("serve", "--max-ttft-ms", "0"), "--max-ttft-ms: 0.0 must be above 0"),
        (("serve", "--url", "http://127.0.0.1:1"), "no OpenAI endpoint answers at"),
    ],
)
def test_a_bad_value_is_one_line_before_anything_is_loaded(
    cli: Cli, arguments: tuple[str, ...], message: str
) -> None:
    result = cli("bench", *arguments)
    assert result.code in (1, 2)
    assert result.err.startswith("error: ")
    assert message in result.err.splitlines()[0]


def test_a_report_that_cannot_be_written_is_told_first(cli: Cli, model: str) -> None:
    result = cli("bench", "latency", model, "--json", "/no/such/folder/report.json")
    assert result.code == 1
    assert "/no/such/folder is not a folder" in result.err


def test_help_of_the_group_names_its_commands(cli: Cli) -> None:
    out = cli("bench", "--help").out
    assert all(name in out for name in ("latency", "throughput", "prefix", "serve"))
