"""The script that checks structured outputs, in a tiny form."""

from __future__ import annotations

import argparse

import jsonschema
import pytest

from scripts import check_structured
from tests.support.tiny_models import save_tiny_folder


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> argparse.Namespace:
    return argparse.Namespace(
        model=str(save_tiny_folder(tmp_path_factory.mktemp("model"))),
        answers=15,
        plain=6,
        plain_tokens=24,
        max_tokens=600,
        max_num_seqs=8,
        seed=0,
    )


def test_answers_are_valid_and_plain_ones_do_not_change(options: argparse.Namespace):
    report = check_structured.check(options)
    assert report["passed"]
    assert (report["valid"], report["plain_changed"]) == (15, [])
    assert set(report["examples"]) == set(check_structured.SCHEMAS)


def test_an_answer_that_is_cut_is_a_failure(options: argparse.Namespace):
    report = check_structured.check(argparse.Namespace(**{**vars(options), "max_tokens": 9}))
    assert not report["passed"]
    assert "ended by length" in {each["error"] for each in report["failures"]}


def test_the_schemas_are_schemas_and_bounded():
    for _, schema in check_structured.SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    job = next(
        check_structured.structured_jobs(argparse.Namespace(answers=1, seed=0, max_tokens=9))
    )
    assert job.sampling_params.temperature == 1.0
