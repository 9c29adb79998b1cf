"""Grammars that leave a model nothing to write but calls of tools, in its own way of writing them.

They are in Lark's notation as llguidance reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedmlx.core.structured import StructuredOutputs
from pagedmlx.text.answer_style import ToolSyntax
from pagedmlx.text.call_xml import schema_types

MAX_CALLS = 16
"""Most calls in an answer that must call: a small model may never come to an end by itself."""

TokenId = Callable[[str], int | None]
"""The id of a special token by its spelling, else None."""

_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "key_separator": ": ",
    "item_separator": ", ",
    "lenient": True,
}


def can_require(syntax: ToolSyntax) -> bool:
    """Whether there is a grammar for calls of this form."""
    return syntax.frame is not None or syntax.is_xml


def call_grammar(
    syntax: ToolSyntax,
    tools: Sequence[Mapping[str, Any]],
    token_id: TokenId,
    *,
    several: bool,
    think: tuple[str, str] | None = None,
    answer: str = "",
) -> str:
    """A grammar of one or more calls.

    Args:
        syntax: One that ``can_require``.
        tools: Those that may be called, checked.
        token_id: Knows special tokens.
        several: Whether more than one call may be made.
        think: Marks of reasoning that may come before.
        answer: What may stand there instead of any call, as the body of a rule.
    """
    rules: list[str] = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        if syntax.is_xml:
            rules += _xml_rules(index, function, syntax, token_id)
        else:
            assert syntax.frame is not None
            before, after = (part.replace("NAME", function["name"]) for part in syntax.frame)
            body = f"{_lark(before, token_id)} args_{index} {_lark(after, token_id)}"
            rules += [f"call_{index}: {body}", f"args_{index}: {_arguments(function)}"]
    calls = " | ".join(f"call_{index}" for index in range(len(tools)))
    more = ""
    if several and syntax.separator is not None:
        more = f" ({_lark(syntax.separator, token_id)} call){{0,{MAX_CALLS - 1}}}"
    thought = ""
    if think is not None:
        thought = "thought? "
        rules += _thought_rules(think, token_id)
    body = f"call{more}"
    if answer:
        body = f"({body} | answer)"
        rules.append(f"answer: {answer}")
    return "\n".join([f"start: {thought}{body}", f"call: {calls}", *rules]) + "\n"


def harmony_grammar(tools: Sequence[Mapping[str, Any]], token_id: TokenId) -> str:
    """The same for answers of several messages: one call, perhaps behind a thought."""
    rules: list[str] = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        before = _lark(
            f"<|channel|>commentary to=functions.{function['name']} <|constrain|>json<|message|>",
            token_id,
        )
        rules += [f"call_{index}: {before} args_{index}"]
        rules += [f"args_{index}: {_arguments(function)}"]
    calls = " | ".join(f"call_{index}" for index in range(len(tools)))
    before = _lark("<|channel|>analysis<|message|>", token_id)
    after = _lark("<|end|><|start|>assistant", token_id)
    rules += [f"thought: {before} /(?s:.*)/ {after}"]
    return "\n".join(["start: thought? call", f"call: {calls}", *rules]) + "\n"


def answer_body(structured: StructuredOutputs) -> str | None:
    """What an answer must be, as the body of a rule; None if it is a grammar of its own."""
    if structured.json_schema is not None:
        return _json(json.loads(structured.json_schema))
    if structured.json_object:
        return _json({"type": "object"})
    if structured.choice is not None:
        return " | ".join(map(_string, structured.choice))
    if structured.regex is not None:
        escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", structured.regex)
        return f"/{escaped}/".replace("\n", r"\n")
    return None


def _xml_rules(
    index: int, function: Mapping[str, Any], syntax: ToolSyntax, token_id: TokenId
) -> list[str]:
    schema = function["parameters"]
    required = set(schema.get("required", ()))
    rules: list[str] = []
    arguments: list[str] = []
    for place, (name, value) in enumerate(schema["properties"].items()):
        rule = f"arg_{index}_{place}"
        before, after = _string(f"<parameter={name}>\n"), _string("\n</parameter>\n")
        if isinstance(value, Mapping) and _is_text_choice(value):
            choices = " | ".join(_string(each) for each in value["enum"])
            rules.append(f"{rule}: {before} ({choices}) {after}")
        elif "string" in schema_types(value):
            # What it ends with can't be part of it.
            end = re.escape("\n</parameter>\n").replace("/", r"\/").replace("\n", "n")
            rules.append(f"{rule}: {before} {rule}_value")
            rules.append(f"{rule}_value[lazy]: /(?s:.*){end}/")
        else:
            rules.append(f"{rule}: {before} {rule}_value {after}")
            rules.append(f"{rule}_value: {_json(_with_definitions(value, schema))}")
        arguments.append(rule if name in required else f"{rule}?")
    before = _lark(f"{syntax.start}\n<function={function['name']}>\n", token_id)
    after = _lark(f"</function>\n{syntax.end}", token_id)
    return [f"call_{index}: {before} {' '.join(arguments)} {after}", *rules]


def _is_text_choice(schema: Mapping[str, Any]) -> bool:
    choices = schema.get("enum")
    return isinstance(choices, list) and bool(choices) and all(isinstance(c, str) for c in choices)


def _thought_rules(think: tuple[str, str], token_id: TokenId) -> list[str]:
    start, end = think
    if token_id(start) is not None and token_id(end) is not None:
        body = rf"/(?s:.*)/ {_lark(end, token_id)} /\s{{0,8}}/"
        return [f"thought: {_lark(start, token_id)} {body}"]
    close = re.escape(end).replace("/", r"\/")
    return [
        rf"thought: {_lark(start, token_id)} rest_of_thought /\s{{0,8}}/",
        f"rest_of_thought[lazy]: /(?s:.*){close}/",
    ]


def _arguments(function: Mapping[str, Any]) -> str:
    """All that a tool takes; what it doesn't tell of it doesn't take."""
    return _json({"additionalProperties": False, **function["parameters"]})


def _with_definitions(value: object, schema: Mapping[str, Any]) -> object:
    if not isinstance(value, Mapping):
        return value
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema} | dict(value)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: object) -> str:
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": _JSON_OPTIONS}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _lark(text: str, token_id: TokenId) -> str:
    """A text as Lark has it: strings, and special tokens by their ids."""
    pieces = re.split(r"(<[^<>\s]+>|\[[A-Z_]+\])", text)
    atoms: list[str] = []
    plain = ""
    for piece in pieces:
        found = token_id(piece) if piece else None
        if found is None:
            plain += piece
            continue
        if plain:
            atoms.append(_string(plain))
        atoms.append(f"<[{found}]>")
        plain = ""
    if plain or not atoms:
        atoms.append(_string(plain))
    return " ".join(atoms)
