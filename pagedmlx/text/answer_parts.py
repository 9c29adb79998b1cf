"""What an assistant's answer is made of, as it grows: reasoning, text and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More of what the model says to itself, without its tags."""

    text: str


@dataclass(frozen=True, slots=True)
class TextPart:
    """More of what it says to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call of a tool, whose arguments follow.

    Attributes:
        index: 0 for the answer's first call.
        call_id: What the tool's result names the call by.
        name: The tool.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments; joined, they are one JSON object.

    Attributes:
        index: The call.
        text: JSON text.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is complete; one that the end of the output has cut off has no such end.

    Attributes:
        index: The call.
    """

    index: int


AnswerPart = ReasoningPart | TextPart | ToolCallBegin | ToolCallArguments | ToolCallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call.

    Attributes:
        call_id: What the tool's result names it by.
        name: The tool.
        arguments: JSON text; a part of it if the output was cut off.
    """

    call_id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """A whole answer, taken apart.

    Attributes:
        content: What is said to the user.
        reasoning: What was said before, to itself.
        tool_calls: The calls, in order.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The message of a conversation that goes on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message
