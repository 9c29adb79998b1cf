"""Engines that play given answers, for models that write in all the ways there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pagedmlx.core.sequence import Sequence as Output
from pagedmlx.engine.engine import Engine
from pagedmlx.engine.tool_syntax import find_tool_syntax
from pagedmlx.text.answer_style import HARMONY_TOKENS
from pagedmlx.text.tokenizer import Tokenizer
from tests.support.engines import FakeRunner, make_engine
from tests.support.tokenizers import CHATML, byte_level_backend, wrap

_MESSAGES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
)
_END = (
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opens_thinking %}<think>\n{% endif %}{% endif %}"
)
_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"

HERMES = (
    f"{_TOOLS}{_MESSAGES}"
    "{% for tool_call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ tool_call.function.name }}", '
    '"arguments": {{ tool_call.function.arguments | tojson }}}\n</tool_call>'
    f"{{# tool_call.name #}}{{% endfor %}}{_END}"
)
"""A template with thoughts and with tools, written as JSON between tags."""

CODER = (
    f"{_TOOLS}{_MESSAGES}{{% for call in message.tool_calls %}}"
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments.items() %}<parameter={{ name }}>\n{{ value }}\n"
    f"</parameter>\n{{% endfor %}}</function>\n</tool_call>{{% endfor %}}{_END}"
)
"""The same with a tag for each argument."""

MISTRAL = (
    f"{_TOOLS}{_MESSAGES}{{% for call in message.tool_calls %}}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments }}{% endfor %}"
    f"{_END}"
)
"""The same with marks that are special tokens, ids of nine characters and arguments as text."""

GEMMA = (
    f"{_TOOLS}{_MESSAGES}{{% for call in message.tool_calls %}}<|tool_call>call:"
    "{{ call.function.name }}{{ call.function.arguments }}<tool_call|>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same with marks that are special tokens in thoughts too."""

GPT_OSS = (
    f"{_TOOLS}Reasoning: {{{{ reasoning_effort | default('medium') }}}}\n"
    "{% for message in messages %}<|start|>{{ message.role }}<|channel|>final<|message|>"
    "{{ message.content }}{% for call in message.tool_calls %}<|start|>assistant to=functions."
    "{{ call.function.name }}<|channel|>commentary json<|message|>{{ call.function.arguments }}"
    "<|call|>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Answers of several channels."""


@dataclass(frozen=True)
class Model:
    """What a model needs to be played.

    Attributes:
        template: Its chat template.
        special: Its special tokens beside the common ones.
        added: Tokens that are whole, but not special.
        end: The token that ends its answers.
    """

    template: str | None
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    end: str = "</s>"

    def tokenizer(self) -> Tokenizer:
        """Bytes, and its tokens."""
        backend = Backend.from_str(byte_level_backend().to_str())
        backend.add_special_tokens([AddedToken(each, normalized=False) for each in self.special])
        backend.add_tokens([AddedToken(each, normalized=False) for each in self.added])
        end = backend.token_to_id(self.end)
        ends = [] if end is None or self.end not in self.special else [end]
        return wrap(backend, chat_template=self.template, eos_token_ids=ends)


_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MODELS = {
    "hermes": Model(HERMES, added=_TAGS),
    "coder": Model(CODER, added=_TAGS),
    "mistral": Model(
        MISTRAL, special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
    ),
    "gemma": Model(
        GEMMA, special=("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>')
    ),
    "gpt-oss": Model(GPT_OSS, special=HARMONY_TOKENS, end="<|call|>"),
    "no tools": Model(CHATML),
    "no template": Model(None),
}


def playing(model: Model, text: str | Sequence[str], **settings: object) -> Callable[[], Engine]:
    """Builds an engine whose answers are ``text``, one for each choice.

    Args:
        model: Who plays.
        text: An answer, or those of the choices in turn. It is written in the model's tokens.
        settings: Of ``make_engine``.
    """
    texts = [text] if isinstance(text, str) else list(text)

    def build() -> Engine:
        tokenizer = model.tokenizer()
        end = tokenizer.token_to_id(model.end)
        assert end is not None
        answers = [[*tokenizer.encode(each, add_special_tokens=False), end] for each in texts]

        def choose(output: Output) -> int:
            answer = answers[output.index % len(answers)]
            return answer[min(output.num_output_tokens, len(answer) - 1)]

        room = {"num_blocks": 1024, "max_model_len": 4096, "prefill_chunk_size": 1024}
        engine = make_engine(FakeRunner(choose), tokenizer=tokenizer, **{**room, **settings})  # type: ignore[arg-type]
        engine.limits = replace(engine.limits, vocab_size=tokenizer.vocab_size)
        engine.answer_style = tokenizer.find_style(find_tool_syntax)
        return engine

    return build
