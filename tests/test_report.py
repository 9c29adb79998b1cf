"""The reports of scripts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from scripts.report import add_json_option, save, save_so_far


def test_what_is_there_so_far_is_in_the_file_and_only_the_whole_on_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    save_so_far({"first": 1}, str(path))
    assert json.loads(path.read_text())["first"] == 1
    save({"first": 1, "second": 2}, str(path))
    assert json.loads(path.read_text())["second"] == 2
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]
    save_so_far({"first": 1}, "-")
    assert capsys.readouterr().out == ""
    save({"second": 2}, "-")
    report = json.loads(capsys.readouterr().out)
    assert report["second"] == 2
    assert report["versions"]["mlx"]


@pytest.mark.parametrize("settings", [{}, {"default": "-"}, {"required": False}])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    settings: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_json_option(parser, **settings)
    target = str(tmp_path / "report.json")
    assert parser.parse_args(["--json", target]).json == target
    assert parser.parse_args(["--json", "-"]).json == "-"
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", str(tmp_path / "missing" / "report.json")])
    error = capsys.readouterr().err
    assert "--json" in error
    assert f"{tmp_path / 'missing'} is not a folder" in error
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", str(tmp_path)])
    assert f"{tmp_path} is a folder: name a file" in capsys.readouterr().err
    if settings:
        assert parser.parse_args([]).json == settings.get("default")
    else:
        with pytest.raises(SystemExit):
            parser.parse_args([])
