"""Chat templates: a conversation to prompt text, with whatever a template objects to as our error.

A template is the model maker's program; it is run in transformers' sandbox. Text of the
conversation can't pose as the template's own control tokens: see ``RenderedChat``.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagedmlx.errors import InvalidRequestError, first_line
from pagedmlx.text.messages import merge_system, normalize_messages, with_parsed_arguments

_GUARD = "\ufdd0"  # a Unicode noncharacter: no ordinary text contains it
_OPEN_PARAMETERS = frozenset({"tools", "documents"})


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt in segments that are to be tokenized one by one.

    There is one segment unless some message spells a special token: then the text is cut inside
    that spelling, after its first character, so that it is tokenized as the plain text it is.

    Attributes:
        segments: Joined, they are the text that the template wrote.
    """

    segments: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole prompt."""
        return "".join(self.segments)


def render_chat(
    apply_template: Callable[..., Any],
    messages: object,
    *,
    special_tokens: Iterable[str],
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any],
) -> RenderedChat:
    """Render a conversation with a tokenizer's chat template.

    Where the template knows no system message, its text goes in front of the first user's.

    Args:
        apply_template: transformers' ``apply_chat_template`` of the tokenizer.
        messages: As ``normalize_messages`` takes them.
        special_tokens: Spellings that only the template itself may use.
        add_generation_prompt: End with the opening of the assistant's answer.
        template_kwargs: Further variables for the template, such as ``enable_thinking``; ``tools``
            are guarded like messages.

    Raises:
        InvalidRequestError: The messages are malformed, the template refuses them (with its own
            reason) or leaves one out, or a variable's name is taken.
    """
    conversation = normalize_messages(messages)
    taken = inspect.signature(apply_template).parameters.keys() - _OPEN_PARAMETERS
    for name in template_kwargs:
        if name in taken or name in ("messages", "self"):
            raise InvalidRequestError("chat_template_kwargs", f"{name!r} can't be set here")
    tools = template_kwargs.get("tools")
    guard, (conversation, tools) = _guard([conversation, tools], special_tokens)
    render = partial(
        apply_template,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **{**template_kwargs, **({} if tools is None else {"tools": tools})},
    )
    try:
        text = _render_all(render, conversation)
    except InvalidRequestError:
        merged = merge_system(conversation)
        if merged is None:
            raise
        text = _render_all(render, merged)
    return RenderedChat(tuple(text.split(guard)))


def _render_all(render: Callable[..., str], conversation: list[dict[str, Any]]) -> str:
    text = _render(render, conversation)
    _check_complete(render, conversation, text)
    return text


def _render(render: Callable[..., str], conversation: list[dict[str, Any]]) -> str:
    """Render; some templates walk through the arguments of a tool call, others write them out."""
    if not any(message.get("tool_calls") for message in conversation):
        return _try(render, conversation)
    parsed = with_parsed_arguments(conversation)
    try:
        text = _try(render, parsed)
    except InvalidRequestError:
        return _try(render, conversation)
    values = [call["function"]["arguments"] for m in parsed for call in m.get("tool_calls", ())]
    if any(_is_python(value, text) for value in values):
        with suppress(InvalidRequestError):
            return _try(render, conversation)
    return text


def _is_python(value: dict[str, Any], text: str) -> bool:
    """Whether a mapping was written into the text as Python has it, which isn't JSON."""
    return str(value) in text and str(value) != json.dumps(value, ensure_ascii=False)


def _try(render: Callable[..., str], conversation: list[dict[str, Any]]) -> str:
    try:
        return render(conversation)
    except Exception as error:  # a template can fail in any way; to the caller it is one
        raise InvalidRequestError(
            "messages",
            f"the model's chat template refuses them: {first_line(error)}",
            hint="Check the roles and their order, and chat_template_kwargs.",
        ) from error


def _guard(value: list[Any], special_tokens: Iterable[str]) -> tuple[str, list[Any]]:
    """Put a guard mark inside each spelling of a special token, everywhere but in the roles."""
    spellings = sorted((token for token in special_tokens if len(token) > 1), key=len, reverse=True)
    runs = re.findall(f"{_GUARD}+", "".join(_strings(value)))
    guard = _GUARD * (1 + max(map(len, runs), default=0))
    if not spellings:
        return guard, value
    pattern = re.compile("|".join(f"{re.escape(s[0])}(?={re.escape(s[1:])})" for s in spellings))

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: match[0] + guard, value)
        if isinstance(value, list):
            return [mark(item) for item in value]
        if isinstance(value, dict):
            return {key: item if key == "role" else mark(item) for key, item in value.items()}
        return value

    return guard, mark(value)


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)


def _is_passed_over(
    render: Callable[..., str], conversation: list[dict[str, Any]], index: int, text: str
) -> bool:
    """Whether the text stays as it is when a message says more.

    Some templates rewrite messages: they take switches such as ``/no_think`` out, or escape them.
    """
    message = conversation[index]
    longer = {**message, "content": f"{message['content']} and more"}
    with suppress(InvalidRequestError):
        return _render(render, [*conversation[:index], longer, *conversation[index + 1 :]]) == text
    return False


def _check_complete(
    render: Callable[..., str], conversation: list[dict[str, Any]], text: str
) -> None:
    """Templates pass over what they don't know; a caller must hear of it."""
    for index, message in enumerate(conversation):
        role = message["role"]
        is_verbatim = role not in ("system", "user") or message["content"].strip() in text
        if not is_verbatim and _is_passed_over(render, conversation, index, text):
            raise InvalidRequestError(
                f"messages[{index}]",
                f"the model's chat template leaves out this {role} message",
                hint="Move its text into a user message.",
            )
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in text:
                raise InvalidRequestError(
                    f"messages[{index}].tool_calls",
                    f"the model's chat template leaves out the call of "
                    f"{call['function']['name']!r}",
                    hint="This model's template knows no tool calls; describe them in the content.",
                )
