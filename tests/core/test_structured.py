"""Structured outputs as a value: exactly one shape, of the right type, of bounded size."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.structured import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_JSON_DEPTH,
    StructuredOutputs,
)
from pagedmlx.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"type": "string"}}}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def test_a_schema_is_kept_as_text_in_its_own_order():
    text = '{"type":"object","properties":{"b":{},"a":{"type":"string"}}}'
    assert StructuredOutputs(json_schema=SCHEMA).json_schema == text  # type: ignore[arg-type]
    spaced = json.dumps(SCHEMA, indent=3)
    assert StructuredOutputs(json_schema=spaced) == StructuredOutputs(json_schema=text)
    assert StructuredOutputs(json_schema="true").kind == "json_schema"


def test_equal_shapes_are_one_key():
    shapes = [StructuredOutputs(choice=["a", "b", "a"]), StructuredOutputs(choice=("a", "b"))]  # type: ignore[arg-type]
    assert len({*shapes, SamplingParams(structured=shapes[0]).structured}) == 1
    assert shapes[0].kind == "choice"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "structured"),
        ({"json_object": False}, "structured"),
        ({"regex": "a", "choice": ("a",)}, "structured"),
        ({"json_object": 1}, "json_object"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"json_schema": '{"maximum": Infinity}'}, "json_schema"),
        ({"json_schema": {"maximum": float("nan")}}, "json_schema"),
        ({"json_schema": {"a": object()}}, "json_schema"),
        ({"json_schema": 5}, "json_schema"),
        ({"json_schema": nested(MAX_JSON_DEPTH + 1)}, "json_schema"),
        ({"json_schema": '{"a":' * 100_000}, "json_schema"),
        ({"json_schema": '{"a":' * 20_000 + "1" + "}" * 20_000}, "json_schema"),
        ({"json_schema": {"const": "\ud800"}}, "json_schema"),
        ({"regex": 5}, "regex"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "regex"),
        ({"grammar": "\ud800"}, "grammar"),
        ({"choice": ()}, "choice"),
        ({"choice": "ab"}, "choice"),
        ({"choice": {"ab": 1}}, "choice"),
        ({"choice": ("a", 5)}, "choice"),
        ({"choice": ("a", ["b"])}, "choice"),
        ({"choice": tuple(map(str, range(MAX_CHOICES + 1)))}, "choice"),
        ({"choice": tuple(f"{i}{'x' * 1000}" for i in range(300))}, "choice"),
        ({"json_object": True, "after": 5}, "after"),
        ({"json_object": True, "after": "x" * 1000}, "after"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
    ],
)
def test_what_is_off_is_refused_by_its_name(fields: dict[str, Any], name: str):
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputs(**fields)
    assert caught.value.field == name
    assert len(str(caught.value)) < 400


def test_sampling_params_take_nothing_else():
    with pytest.raises(InvalidRequestError, match="structured"):
        SamplingParams(structured={"regex": "a"})  # type: ignore[arg-type]


def test_a_schema_may_be_as_deep_as_the_limit_says():
    assert StructuredOutputs(json_schema=nested(MAX_JSON_DEPTH - 1)).kind == "json_schema"
