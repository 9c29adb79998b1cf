"""mlx-lm's parsers of tool calls: which one a model needs, and what it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolParser:
    """One of mlx-lm's parsers.

    Attributes:
        start: The mark before a call.
        end: The mark after it; empty if there is none.
        parse: Takes what is between them and the tools in OpenAI's form; gives an object with
            ``name`` and ``arguments``, or a list of them, and fails in any way.
    """

    start: str
    end: str
    parse: Callable[[str, list[Any]], Any]


def infer_tool_parser(template: str, tokenizer: Any) -> str | None:
    """The name of the parser for a model; None if mlx-lm knows none.

    Args:
        template: Its chat template.
        tokenizer: The tokenizer of transformers, whose configuration may name one.
    """
    from mlx_lm.tokenizer_utils import _infer_tool_parser

    asked = SimpleNamespace(chat_template=template, get_vocab=tokenizer.get_vocab)
    return tokenizer.init_kwargs.get("tool_parser_type") or _infer_tool_parser(asked)


def load_tool_parser(name: str) -> ToolParser | None:
    """A parser by its name; None if this mlx-lm has none of that name."""
    try:
        module = import_module(f"mlx_lm.tool_parsers.{name}")
    except ImportError:
        return None
    return ToolParser(module.tool_call_start, module.tool_call_end, module.parse_tool_call)
