"""Requests of agents for ``fuzz_server.py``: tools, schemas, items, blocks; well-made and odd."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

AGENT_PATHS = ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens")

SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]},
    {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False},
    {"enum": ["x", "y", 5, None]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    *({}, True, False, {"type": "banana"}, {"type": "integer", "minimum": 5, "maximum": 1}),
    {"$ref": "#"},
    {"$ref": "http://localhost/x"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "string", "pattern": "(a{1000}){1000}"},
    {"type": "string", "pattern": "("},
    {"anyOf": []},
    {"type": "object", "properties": {"": {"const": "\ud800"}}, "required": [""]},
    {"type": "object", "minProperties": 10**9},
    {"type": "array", "minItems": 10**6},
    {"enum": list(range(3000))},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}},
)
GRAMMARS: tuple[Any, ...] = (
    *({"regex": "[ab]{1,5}"}, {"regex": "(a+)+b"}, {"regex": "\\"}, {"regex": "[^a]*" * 200}),
    *({"choice": ["a", "bc"]}, {"choice": []}, {"choice": [""]}, {"choice": [5]}),
    *({"grammar": 'start: "a" | "b" start'}, {"grammar": "start: start"}, {"grammar": "x"}),
    *({"json_object": True}, {"json": {"type": "null"}}, {"json": "{"}, {}, {"banana": 1}),
)


class AgentMaker:
    """Makes up bodies from a source of chance and a source of texts."""

    def __init__(self, chance: random.Random, text: Callable[[], str]) -> None:
        self.chance = chance
        self.text = text

    def body(self, path: str) -> dict[str, Any]:
        """A body for one of ``AGENT_PATHS``."""
        body = self.response() if path == AGENT_PATHS[0] else self.message()
        if self.chance.random() < 0.4:
            body["stream"] = True
        if self.chance.random() < 0.3:
            body["structured_outputs"] = self.chance.choice(GRAMMARS)
        return body

    def chat_options(self) -> dict[str, Any]:
        """Fields for chat completions."""
        schema = {"name": "x", "schema": self.chance.choice(SCHEMAS)}
        return {
            "tools": [{"type": "function", "function": each} for each in self.functions()],
            "tool_choice": self.chance.choice(
                ("auto", "none", "required", {"type": "function", "function": {"name": "f0"}})
            ),
            "parallel_tool_calls": False,
            "response_format": self.chance.choice(
                ({"type": "json_object"}, {"type": "json_schema", "json_schema": schema})
            ),
            "structured_outputs": self.chance.choice(GRAMMARS),
            "reasoning_effort": self.chance.choice(("none", "low", "high", "banana")),
        }

    def functions(self, key: str = "parameters") -> list[dict[str, Any]]:
        """Some functions; most of them are well-made."""
        return [
            {
                "name": f"f{index}" if self.chance.random() < 0.95 else self.text()[:70],
                "description": self.text(),
                key: SCHEMAS[0] if self.chance.random() < 0.7 else self.chance.choice(SCHEMAS),
            }
            for index in range(self.chance.choice((0, 1, 1, 2, 5)))
        ]

    def response(self) -> dict[str, Any]:
        """A body for responses."""
        chance = self.chance
        call = {"type": "function_call", "call_id": "c", "name": "f0", "arguments": self.odd_json()}
        items: list[Any] = [
            {"role": "user", "content": self.text()},
            {"role": "developer", "content": [{"type": "input_text", "text": self.text()}]},
            {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": self.text()},
            {"role": "assistant", "content": [{"type": "output_text", "text": self.text()}]},
            call,
            {"type": "function_call_output", "call_id": "c", "output": self.text()},
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            {"type": "item_reference", "id": "msg_1"},
            {"type": "banana"},
        ]
        weights = [9, 2, 2, 4, 4, 4, 1, 1, 1]
        options: dict[str, Any] = {
            "instructions": self.text(),
            "tools": [{"type": "function", **each} for each in self.functions()],
            "tool_choice": chance.choice(
                ("auto", "none", "required", {"type": "function", "name": "f0"})
            ),
            "previous_response_id": "resp_1",
            "store": chance.random() < 0.5,
            "text": {"format": chance.choice(({"type": "json_object"}, self.schema_format()))},
            "reasoning": {"effort": chance.choice(("none", "low", "banana"))},
            "include": ["reasoning.encrypted_content"],
            "metadata": {"a": "b"},
            "temperature": chance.choice((0, 1)),
        }
        body: dict[str, Any] = {
            "input": chance.choices(items, weights, k=chance.choice((1, 1, 3, 6))),
            "max_output_tokens": chance.choice((1, 7, 40)),
        }
        if chance.random() < 0.5:
            body["input"] = self.text()
        return body | {name: options[name] for name in chance.sample(sorted(options), 2)}

    def message(self) -> dict[str, Any]:
        """A body for Anthropic's messages."""
        chance = self.chance
        call = {"type": "tool_use", "id": "t", "name": "f0", "input": {"a": self.text()}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": self.text()}
        thought = {"type": "thinking", "thinking": self.text(), "signature": "s"}
        turns: tuple[list[Any], ...] = (
            [{"role": "user", "content": self.text()}],
            [{"role": "user", "content": [{"type": "text", "text": self.text()}]}],
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": [thought, {"type": "text", "text": "y"}, call]},
                {"role": "user", "content": [result | {"is_error": True}]},
            ],
            [{"role": "user", "content": [{"type": "image"}]}],
            [{"role": "assistant", "content": "{"}],
            [{"role": "user", "content": []}],
            [{"role": "user", "content": [result]}],
        )
        options: dict[str, Any] = {
            "system": chance.choice((self.text(), [{"type": "text", "text": self.text()}])),
            "tools": self.functions("input_schema"),
            "tool_choice": chance.choice(
                ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f0"}, {"type": "x"})
            ),
            "thinking": chance.choice(
                ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": 5})
            ),
            "stop_sequences": ["a"],
            "temperature": chance.choice((0, 1)),
            "output_config": {"format": self.schema_format()},
            "metadata": {"user_id": "u"},
        }
        body = {
            "messages": chance.choices(turns, [6, 4, 4, 1, 1, 1, 1])[0],
            "max_tokens": chance.choice((1, 7, 40)),
        }
        return body | {name: options[name] for name in chance.sample(sorted(options), 2)}

    def schema_format(self) -> dict[str, Any]:
        """A format that is a schema."""
        return {"type": "json_schema", "name": "x", "schema": self.chance.choice(SCHEMAS)}

    def odd_json(self) -> str:
        """Arguments as models write them."""
        return self.chance.choice(('{"a": "b"}', "", "not json", "[1]", "{", "null"))
