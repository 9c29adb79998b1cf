"""A tiny model with a real tokenizer and room for what agents send."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.support.tiny_models import CONFIGS, build_model
from tests.support.tokenizers import smollm2_tokenizer

THINKING_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Call them as <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set state = namespace(asked=0) %}
{%- for message in messages if message.role == 'user' %}
{%- set state.asked = state.asked + 1 %}
{%- endfor %}
{%- set seen = namespace(asked=0) %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{%- if message.role == 'user' %}{% set seen.asked = seen.asked + 1 %}{% endif %}<|im_start|>
{{- message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content and seen.asked == state.asked %}<think>
{{ message.reasoning_content.strip() }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}{% set tool_call = call.function %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{{ '{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{ '}' }}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
"""A chat template that knows tools, and reasoning, which it forgets when the user speaks again."""


def save_agent_folder(path: Path, *, template: str | None = None, max_len: int = 16384) -> Path:
    """Write a folder that loads: random weights, and the tokenizer of the embedded model.

    Args:
        path: The folder.
        template: Another chat template than the tokenizer's own.
        max_len: Longest prompt plus answer.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = smollm2_tokenizer()
    config = {
        **CONFIGS["llama_tied"],
        "num_hidden_layers": 2,
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": max_len,
        "eos_token_id": min(tokenizer.eos_token_ids),
    }
    weights = dict(tree_flatten(build_model(config).parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer._inner.save_pretrained(path)
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path
