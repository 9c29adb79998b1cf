"""Turn: what a chat-like request asks of the assistant: a conversation, tools, reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.structured import StructuredOutputs
from pagedmlx.engine.inputs import PreparedJob
from pagedmlx.engine.outputs import Job, Messages, RequestOutput
from pagedmlx.errors import InvalidRequestError
from pagedmlx.text.answer_parser import AnswerParser, answer_parser, parse_answer, to_message
from pagedmlx.text.answer_style import AnswerStyle, ToolSyntax, json_syntax
from pagedmlx.text.messages import normalize_messages
from pagedmlx.text.reasoning import effort_variables
from pagedmlx.text.tokenizer import Tokenizer
from pagedmlx.text.tool_grammar import (
    answer_body,
    call_grammar,
    can_require,
    harmony_grammar,
)
from pagedmlx.text.tools import (
    ToolChoice,
    ToolMode,
    check_tool_choice,
    check_tools,
    mentions_tools,
    tell_of_tools,
)

_GREETING = ({"role": "user", "content": "Hello"},)
_MAX_TAIL = 32
"""Tokens of a prompt's end that may open the reasoning."""


class ChatModel(Protocol):
    """What is needed of a model: an engine, whole or from afar."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        ...

    @property
    def answer_style(self) -> AnswerStyle:
        """How it marks reasoning and calls of tools."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the assistant.

    Attributes:
        messages: The conversation, in OpenAI's form.
        tools: What may be called, checked.
        choice: Whether it must be, or must not.
        parallel_tool_calls: Whether several calls may be made at once.
        template_kwargs: Variables of the chat template, those for reasoning among them.
        splits_reasoning: Whether reasoning is told apart; else its tags stay in the text.
        is_native: Whether the template can tell of the tools; else it is done for it.
    """

    messages: Messages
    tools: tuple[Mapping[str, Any], ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    splits_reasoning: bool = True
    is_native: bool = True

    @classmethod
    def read(
        cls,
        model: ChatModel,
        messages: Messages,
        *,
        tools: object = None,
        tool_choice: object = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: object = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        splits_reasoning: bool = True,
    ) -> Turn:
        """Check what a request says.

        Args:
            model: It is for.
            messages: The conversation; checked when the job is prepared.
            tools: In OpenAI's form.
            tool_choice: In OpenAI's form.
            parallel_tool_calls: Whether several calls may be made at once.
            reasoning_effort: ``none`` to ``max``.
            chat_template_kwargs: Further variables for the chat template.
            splits_reasoning: Whether reasoning is told apart.

        Raises:
            InvalidRequestError: Something of it is off.
        """
        checked = check_tools(tools)
        choice = check_tool_choice(tool_choice, checked)
        offered = () if choice.mode is ToolMode.NONE else checked
        variables = effort_variables(reasoning_effort, model.answer_style)
        variables |= chat_template_kwargs or {}
        return cls(
            messages=messages,
            tools=offered,
            choice=choice,
            parallel_tool_calls=parallel_tool_calls,
            template_kwargs=variables,
            splits_reasoning=splits_reasoning,
            is_native=not offered or _tells_of(model, offered, variables),
        )

    def job(self, model: ChatModel, sampling_params: SamplingParams, **fields: Any) -> Job:
        """What the engine is to do.

        Args:
            model: The model.
            sampling_params: Of the request; a required call becomes a grammar in them.
            fields: Further fields of ``Job``.

        Raises:
            InvalidRequestError: The conversation is malformed, or asks for what can't be.
        """
        style = model.answer_style
        syntax = self._syntax(style, sampling_params)
        messages, variables = self.messages, dict(self.template_kwargs)
        if syntax is style.tools:
            if self.tools:
                variables["tools"] = list(self._told)
            if syntax is not None and syntax.id_length:
                messages = _with_short_ids(normalize_messages(messages), syntax.id_length)
        elif self.tools or mentions_tools(messages):
            messages = tell_of_tools(normalize_messages(messages), self._told)
        params = self._constrained(model, syntax, sampling_params, variables)
        return Job(
            messages=messages,
            sampling_params=params,
            chat_template_kwargs=variables,
            shown_tokens=self._marks(style),
            grammar_parts={} if params.structured is None else self._schemas(),
            **fields,
        )

    def parser(self, model: ChatModel, prepared: PreparedJob) -> AnswerParser:
        """What takes one of the job's answers apart."""
        style = model.answer_style
        if not self.splits_reasoning:
            # Answers of several messages can't be read without splitting them.
            style = replace(style, think=None, is_harmony=style.is_harmony and bool(self.tools))
        return answer_parser(
            style,
            tools=self.tools,
            syntax=self._syntax(style, prepared.params),
            is_thinking=_opens_thought(model.tokenizer, style, prepared.prompt_token_ids),
            max_calls=None if self.parallel_tool_calls else 1,
        )

    def with_messages(
        self, model: ChatModel, prepared: PreparedJob, output: RequestOutput
    ) -> RequestOutput:
        """The job's finished output with what its texts say, taken apart."""
        return replace(
            output,
            outputs=tuple(
                replace(
                    each, message=to_message(parse_answer(self.parser(model, prepared), each.text))
                )
                for each in output.outputs
            ),
        )

    def _schemas(self) -> dict[str, StructuredOutputs]:
        """The parameters of each function, which a grammar of calls is made of."""
        functions = [tool["function"] for tool in self._callable]
        return {
            f"the parameters of {each['name']!r}": StructuredOutputs(
                json_schema=json.dumps(each["parameters"])
            )
            for each in functions
        }

    @property
    def _told(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the model is told of."""
        if self.choice.mode is ToolMode.AUTO and self.choice.names:
            return self._callable
        return self.tools

    @property
    def _callable(self) -> list[Mapping[str, Any]]:
        names = self.choice.names
        return [tool for tool in self.tools if not names or tool["function"]["name"] in names]

    def _syntax(self, style: AnswerStyle, params: SamplingParams) -> ToolSyntax | None:
        """How calls are written: the model's own way, or else the generic one."""
        own = style.tools
        if style.is_harmony:
            return None
        if own is None or not self.is_native:
            return json_syntax()
        has_grammar = self.choice.mode is ToolMode.REQUIRED or params.structured is not None
        return json_syntax() if has_grammar and not can_require(own) else own

    def _marks(self, style: AnswerStyle) -> tuple[str, ...]:
        """Special tokens that the parser needs to see."""
        return style.control if self.tools or (self.splits_reasoning and style.reasons) else ()

    def _constrained(
        self,
        model: ChatModel,
        syntax: ToolSyntax | None,
        params: SamplingParams,
        variables: Mapping[str, Any],
    ) -> SamplingParams:
        must = self.choice.mode is ToolMode.REQUIRED
        wanted = params.structured
        if wanted is None and not must:
            return params
        if wanted is not None and must:
            raise InvalidRequestError(
                "tool_choice", "'required' leaves no room for an answer of another form"
            )
        after = self._after(model, variables)
        if must or (self.tools and not model.answer_style.is_harmony):
            grammar = self._grammar(model, syntax, wanted, may_think=not after)
            wanted = StructuredOutputs(grammar=grammar)
        assert wanted is not None
        if model.answer_style.is_harmony and not must:
            after = "<|channel|>final<|message|>"
        return replace(params, structured=replace(wanted, after=wanted.after or after))

    def _after(self, model: ChatModel, variables: Mapping[str, Any]) -> str:
        """What ends the reasoning that the prompt opens; empty if it opens none."""
        style, tokenizer = model.answer_style, model.tokenizer
        if style.think is None:
            return ""
        prompt = tokenizer.apply_chat_template(_GREETING, **variables)
        return style.think[1] if _opens_thought(tokenizer, style, prompt) else ""

    def _grammar(
        self,
        model: ChatModel,
        syntax: ToolSyntax | None,
        wanted: StructuredOutputs | None,
        *,
        may_think: bool,
    ) -> str:
        token_id = model.tokenizer.special_token_id
        if syntax is None:
            return harmony_grammar(self._callable, token_id)
        answer = "" if wanted is None else answer_body(wanted)
        if answer is None:
            raise InvalidRequestError(
                "tools", "a grammar for the answer leaves no room for them", hint="leave them out"
            )
        return call_grammar(
            syntax,
            self._callable,
            token_id,
            several=self.parallel_tool_calls and not self._is_named,
            think=model.answer_style.think if may_think and self._thinks else None,
            answer=answer,
        )

    @property
    def _is_named(self) -> bool:
        """Whether one function must be called, which is called once."""
        return self.choice.mode is ToolMode.REQUIRED and len(self.choice.names) == 1

    @property
    def _thinks(self) -> bool:
        """Whether reasoning hasn't been switched off."""
        given = [self.template_kwargs.get(name) for name in ("enable_thinking", "thinking")]
        return False not in given


def _tells_of(
    model: ChatModel, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> bool:
    """Whether the template takes these tools, and has a place for each of them."""
    if model.answer_style.tools is None:
        return model.answer_style.is_harmony
    try:
        text = model.tokenizer.render_chat(_GREETING, **{**variables, "tools": list(tools)}).text
    except InvalidRequestError:
        return False
    return all(tool["function"]["name"] in text for tool in tools)


def _opens_thought(tokenizer: Tokenizer, style: AnswerStyle, prompt: Sequence[int]) -> bool:
    if style.think is None:
        return False
    tail = tokenizer.decode(prompt[-_MAX_TAIL:], skip_special_tokens=False)
    return tail.rstrip().endswith(style.think[0])


def _with_short_ids(messages: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """Ids of calls as a template takes them: that many letters and digits."""

    def short(call_id: object) -> object:
        if not isinstance(call_id, str) or re.fullmatch(rf"[A-Za-z0-9]{{{length}}}", call_id):
            return call_id
        return blake2b(call_id.encode(), digest_size=length).hexdigest()[:length]

    def with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
        changed = dict(message)
        if "tool_call_id" in changed:
            changed["tool_call_id"] = short(changed["tool_call_id"])
        if "tool_calls" in changed:
            changed["tool_calls"] = [
                {**call, "id": short(call.get("id"))} for call in changed["tool_calls"]
            ]
        return changed

    return list(map(with_short_ids, messages))
