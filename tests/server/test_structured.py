"""Answers of a given shape over a socket, in OpenAI's, vLLM's and llama.cpp's words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from pagedmlx.config import EngineConfig
from pagedmlx.core.structured import StructuredOutputs
from pagedmlx.engine.load import load_engine
from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.structured import close_objects, read_structured
from tests.support.server import RunningServer, serving
from tests.support.tiny_models import save_tiny_folder

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": [1, 2]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "<" /[ab]{2,4}/ ">"'


@pytest.fixture(scope="module")
def _tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_folder(tmp_path_factory.mktemp("model"))
    config = EngineConfig(model=str(folder), num_blocks=200, check_integrity=True)
    with serving(lambda: load_engine(config)) as server:
        yield server


@pytest.fixture
def tiny(_tiny: RunningServer) -> Iterator[RunningServer]:
    yield _tiny
    _tiny.assert_idle()


def json_format(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    inner = {"name": "x", "schema": schema, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        (json_format(), None),
        (json_format(strict=True, description="y"), None),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, None),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, None),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            r"\S*|.*\".*\".*",
        ),
        ({"structured_outputs": {"regex": r"\d{2}[xy]"}}, r"\d{2}[xy]"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": GRAMMAR}}, "<[ab]{2,4}>"),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, None),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "a|b"),
        ({"grammar": GRAMMAR}, "<[ab]{2,4}>"),
        ({"json_schema": SCHEMA, "grammar": ""}, None),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_answer_has_the_shape_that_was_asked_for(
    tiny: RunningServer, fields: dict[str, Any], check: str | None
):
    body = {"max_tokens": 100, "seed": 3, "temperature": 1.0, **fields}
    chat = tiny.chat(**body).json["choices"][0]
    completion = tiny.complete(**body).json["choices"][0]
    for text, reason in (
        (chat["message"]["content"], chat["finish_reason"]),
        (completion["text"], completion["finish_reason"]),
    ):
        assert reason == "stop"
        if check is None:
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert re.fullmatch(check, text)
    events = tiny.chat(**body, stream=True).events
    deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == chat["message"]["content"]


def test_any_object_and_plain_text_can_be_asked_for(tiny: RunningServer):
    text = tiny.complete(max_tokens=8, response_format={"type": "json_object"}).json["choices"][0]
    assert text["text"].startswith("{")
    for fields in ({"response_format": {"type": "text"}}, {"grammar": None}, {"json_schema": None}):
        assert tiny.chat(max_tokens=2, **fields).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "x"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (json_format(None), "response_format.json_schema.schema"),
        (json_format([]), "response_format.json_schema.schema"),
        (json_format(False), "response_format.json_schema.schema"),
        (
            json_format({"type": "integer", "minimum": 3, "maximum": 1}),
            "response_format.json_schema.schema",
        ),
        (json_format({"$ref": "#"}), "response_format.json_schema.schema"),
        (json_format(strict=1), "response_format.json_schema.strict"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [["yes"]]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {}, "guided_whitespace_pattern": "("}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({**json_format(), "guided_regex": "a"}, "guided_regex"),
        ({"grammar": "start: a"}, "grammar"),
        ({"json_schema": {"type": "no such"}}, "json_schema"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_followed_is_refused_by_its_place(
    tiny: RunningServer, fields: dict[str, Any], param: str
):
    for stream in (False, True):
        for answer in (tiny.chat(stream=stream, **fields), tiny.complete(stream=stream, **fields)):
            assert (answer.status, answer.error["param"]) == (400, param)
            assert answer.error["type"] == "invalid_request_error"
            assert len(answer.error["message"]) < 500


def test_a_schema_of_any_depth_is_answered(tiny: RunningServer):
    deep: Any = {}
    for _ in range(400):
        deep = {"anyOf": [deep]}
    for fields in (json_format(deep, strict=True), {"structured_outputs": {"json": deep}}):
        assert tiny.chat(**fields).status == 400


def test_a_request_that_leaves_no_token_fails_alone(tiny: RunningServer):
    answer = tiny.complete(structured_outputs={"regex": "ab"}, bad_words=["b"])
    assert answer.status == 400
    assert "no token is left" in answer.error["message"]


# Reading.


def test_strict_schemas_have_no_other_properties():
    inner = {"type": "object", "properties": {"x": {}}}
    schema = {
        "properties": {"properties": inner, "list": {"items": {"anyOf": [inner, {}]}}},
        "$defs": {"d": inner, "open": {**inner, "additionalProperties": True}},
        "allOf": [inner],
    }
    closed: Any = close_objects(schema)
    assert closed["properties"]["properties"] == {**inner, "additionalProperties": False}
    assert closed["properties"]["list"]["items"]["anyOf"][0]["additionalProperties"] is False
    assert closed["$defs"]["d"]["additionalProperties"] is False
    assert closed["$defs"]["open"]["additionalProperties"] is True
    assert closed["allOf"] == [inner]
    assert "additionalProperties" not in closed
    assert close_objects(True) is True


def test_whitespace_is_as_asked_for():
    asked = {"json": {}, "whitespace_pattern": r"\s"}
    found, _ = read_structured({"structured_outputs": asked})
    assert found == StructuredOutputs(json_schema="{}", whitespace_pattern=r"\s")
    found, _ = read_structured({"guided_json": {}, "guided_whitespace_pattern": " "})
    assert found == StructuredOutputs(json_schema="{}", whitespace_pattern=" ")
    assert read_structured({"response_format": {"type": "text"}}) == (None, {})
    with pytest.raises(InvalidRequestError, match="doesn't go with"):
        read_structured({"json_schema": {}, "guided_choice": ["a"]})
