"""The fields of ``/v1/responses`` and of Anthropic's ``/v1/messages``; docs/api.md lists them."""

from __future__ import annotations

from pagedmlx.server.field import Field, no_effect, refused, sampling, used
from pagedmlx.server.fields import CHAT_FIELDS

_CHAT = {field.name: field for field in CHAT_FIELDS}


def _as_in_chat(*names: str) -> tuple[Field, ...]:
    return tuple(_CHAT[name] for name in names)


_SAMPLING = _as_in_chat("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
_SERVING = _as_in_chat("structured_outputs", "priority", "cache_salt", "chat_template_kwargs")

RESPONSE_FIELDS = (
    used("input", "Text, or items: messages, reasoning, function calls and their outputs."),
    used("instructions", "A system message in front; not kept for answers that go on from it."),
    used("previous_response_id", "Go on from a stored answer."),
    used("store", "Keep the answer, within the server's bounds; on."),
    *_as_in_chat("model", "stream", "parallel_tool_calls"),
    used("tools", "function, custom, namespace; what OpenAI's own servers run is left out."),
    used("tool_choice", "auto, none, required, one tool, or allowed_tools."),
    sampling("max_output_tokens", "Most tokens of an answer.", "max_tokens"),
    *_SAMPLING,
    *_as_in_chat("presence_penalty", "frequency_penalty", "stop"),
    used("text", "`format`: text, json_object or json_schema."),
    used("reasoning", "`effort`; a `summary` can't be had, the reasoning itself comes instead."),
    used("include", "`reasoning.encrypted_content`; what belongs to hosted tools never comes."),
    used("metadata", "Notes of the client, which the answer repeats."),
    *_SERVING,
    *_as_in_chat(
        *("user", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options"),
    ),
    no_effect("stream_options", "Streams are not padded, and end with token counts."),
    no_effect("max_tool_calls", "There are no hosted tools."),
    no_effect("context_management", "Nothing is taken out of a conversation."),
    no_effect("moderation", "Nothing is moderated."),
    no_effect("access_programs", "There are none."),
    no_effect("image", "There are no images."),
    no_effect("client_metadata", "Notes of the client."),
    refused("truncation", "Leaving out parts of a conversation.", "disabled"),
    refused("background", "Answers that nobody waits for.", False),
    refused("background_options", "Answers that nobody waits for."),
    refused("conversation", "Send the items, or previous_response_id."),
    refused("prompt", "Templates that a server keeps."),
    refused("top_logprobs", "Chat tells log probabilities.", 0),
)

MESSAGE_FIELDS = (
    used("messages", "The conversation: roles user and assistant, text or content blocks."),
    used("system", "A system message: text or text blocks."),
    *_as_in_chat("model", "stream"),
    sampling("max_tokens", "Most tokens of an answer; must be given."),
    used("tools", "Functions with `input_schema`; what Anthropic's servers run is left out."),
    used("tool_choice", "auto, any, tool or none; `disable_parallel_tool_use`."),
    used("thinking", "enabled, adaptive or disabled, for models that can do both."),
    used("output_config", "`format`: a JSON schema; `effort`."),
    used("output_format", "The older name of `output_config.format`."),
    sampling("stop_sequences", "Texts that end the answer and are not part of it.", "stop"),
    *_SAMPLING,
    *_SERVING,
    no_effect("cache_control", "Equal beginnings are found without it, here and in blocks."),
    no_effect("metadata", "Notes of the client."),
    no_effect("service_tier", "There is one."),
    no_effect("context_management", "Nothing is taken out of a conversation."),
    no_effect("compaction", "Nothing is taken out of a conversation."),
    no_effect("diagnostics", "There are none."),
    no_effect("speed", "There is one."),
    no_effect("inference_geo", "It is this machine."),
    no_effect("betas", "As the header `anthropic-beta`."),
    no_effect("billing_policy", "Nothing is billed."),
    no_effect("fallbacks", "There is one model."),
    no_effect("fallback_credit_token", "Nothing is billed."),
    no_effect("user_profile_id", "Who asks."),
    no_effect("workspace_id", "Who asks."),
    refused("mcp_servers", "Tools that a server calls.", []),
    refused("container", "Tools that a server runs."),
    refused("thread", "Conversations that a server keeps."),
)
