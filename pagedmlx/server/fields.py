"""The fields of chat and completions, once, and how the values of a request's fields are read.

Null is the same as absent everywhere. docs/api.md lists the fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import InvalidRequestError
from pagedmlx.server.field import Field, Use
from pagedmlx.server.field import no_effect as _no_effect
from pagedmlx.server.field import refused as _refused
from pagedmlx.server.field import sampling as _sampling
from pagedmlx.server.field import used as _used
from pagedmlx.values import shown

T = TypeVar("T")
D = TypeVar("D")


_SHARED = (
    _used("model", "A name of the served model; it may be left out."),
    _used("stream", "Send the answer as server-sent events while it grows."),
    _used("stream_options", "`include_usage`: end the stream with a chunk of token counts."),
    _sampling("n", "Answers for each prompt, 1 to 64; they share its blocks."),
    _sampling("temperature", "0 takes the likeliest token, at most 100."),
    _sampling("top_p", "Sample from the likeliest tokens up to this probability."),
    _sampling("top_k", "Sample from this many likeliest tokens; 0 and -1 are off."),
    _sampling("min_p", "Drop tokens less likely than this times the likeliest."),
    _sampling("seed", "Makes sampled answers reproducible."),
    _sampling("min_tokens", "Don't stop before this many tokens."),
    _sampling("stop", "A string, or up to 64, that end the answer and are not part of it."),
    _sampling("stop_token_ids", "Token ids that end the answer."),
    _sampling("include_stop_str_in_output", "Leave what ended the answer in it."),
    _sampling("ignore_eos", "Go on after the model's own end."),
    _sampling("skip_special_tokens", "Leave special tokens out of the text; on."),
    _sampling("repetition_penalty", "Above 1, tokens of prompt and answer are less likely."),
    _sampling("presence_penalty", "Above 0, tokens of the answer are less likely, -2 to 2."),
    _sampling("frequency_penalty", "The same for each time that they came, -2 to 2."),
    _sampling("logit_bias", "Token ids to numbers from -100 to 100, added to their logits."),
    _sampling("allowed_token_ids", "Only these tokens can be chosen."),
    _sampling("bad_words", "Words that are never completed."),
    _sampling("prompt_logprobs", "Also tell how likely the prompt's tokens are; not in streams."),
    _used("priority", "Larger is served first; 0."),
    _used("cache_salt", "Cached prompt beginnings are shared only under the same salt."),
    _used("response_format", "`text`, `json_object`, or `json_schema` with `schema`, `strict`."),
    _used(
        "structured_outputs",
        "One of `json`, `regex`, `choice`, `grammar`, `json_object`; with JSON also "
        "`whitespace_pattern`, `disable_any_whitespace`, `disable_additional_properties`.",
    ),
    _used("guided_json", "An older name of `structured_outputs.json`."),
    _used("guided_regex", "An older name of `structured_outputs.regex`."),
    _used("guided_choice", "An older name of `structured_outputs.choice`."),
    _used("guided_grammar", "An older name of `structured_outputs.grammar`."),
    _used("guided_whitespace_pattern", "Goes with `guided_json`."),
    _used("grammar", "llama.cpp's name of `structured_outputs.grammar`."),
    _used("json_schema", "llama.cpp's name of `structured_outputs.json`."),
    _no_effect("guided_decoding_backend", "There is one."),
    _no_effect("user", "Who asks."),
    _no_effect("metadata", "Notes of the client."),
    _no_effect("store", "Nothing is stored."),
    _no_effect("service_tier", "There is one."),
    _no_effect("safety_identifier", "Who asks."),
    _no_effect("prompt_cache_key", "Equal beginnings are found without it."),
    _no_effect("prompt_cache_retention", "The pool decides."),
    _no_effect("prompt_cache_options", "The pool decides."),
    _no_effect("request_id", "The answer has an id of its own; the header X-Request-Id is kept."),
    _no_effect("spaces_between_special_tokens", "Tokenizers that it is for are not supported."),
    _refused("best_of", "Choosing among more answers than are returned.", 1),
    _refused("use_beam_search", "Beam search.", False),
    _refused("length_penalty", "Of beam search.", 1, 1.0),
    _refused("early_stopping", "Of beam search.", False),
    _refused("logits_processors", "Code from requests.", []),
    _refused("truncate_prompt_tokens", "Cutting the prompt."),
    _refused("typical_p", "Typical sampling.", 1, 1.0),
    _refused("xtc_probability", "XTC sampling.", 0, 0.0),
    _refused("dry_multiplier", "DRY sampling.", 0, 0.0),
    _refused("mirostat", "Mirostat.", 0),
    _refused("repeat_penalty", "Its name here is repetition_penalty.", 1, 1.0),
    _refused("num_predict", "Its name here is max_tokens."),
    _refused("n_predict", "Its name here is max_tokens."),
)

CHAT_FIELDS = (
    _used("messages", "The conversation: objects with `role` and `content`, text or text parts."),
    *_SHARED,
    _used("max_tokens", "Most tokens of an answer; else until the context is full."),
    _used("max_completion_tokens", "The same by its newer name."),
    _used("logprobs", "true tells how likely each token of the answer was."),
    _used("top_logprobs", "With it: also of this many likeliest tokens, 0 to 20."),
    _used("chat_template_kwargs", "Further variables for the chat template."),
    _used("tools", "Functions that the model may call, up to 512."),
    _used("tool_choice", "auto, none, required, one function, or allowed_tools."),
    _used("parallel_tool_calls", "false: at most one call in an answer."),
    _used("reasoning_effort", "none switches reasoning off; minimal to max, as the model knows."),
    _used("separate_reasoning", "false leaves reasoning in the content, with its tags."),
    _used("include_reasoning", "false leaves reasoning out of the answer."),
    _no_effect("prediction", "It would only be about speed."),
    _refused("functions", "Its name here is tools.", []),
    _refused("function_call", "Its name here is tool_choice.", "none", "auto"),
    _refused("modalities", "Anything but text.", ["text"]),
    _refused("audio", "Anything but text."),
    _refused("web_search_options", "Searching."),
    _refused("verbosity", "Say it in a message.", "medium"),
    _refused("echo", "Repeating the last message.", False),
    _refused("add_generation_prompt", "Answers of other roles.", True),
    _refused("continue_final_message", "Going on with the last message.", False),
    _refused("add_special_tokens", "The chat template decides.", False),
    _refused("chat_template", "Templates from requests."),
    _refused("documents", "Templates that know it take it from chat_template_kwargs.", []),
)

COMPLETION_FIELDS = (
    _used("prompt", "A string, a list of strings, token ids, or a list of lists of token ids."),
    *_SHARED,
    _sampling("max_tokens", "Most tokens of an answer; 16."),
    _sampling("logprobs", "How likely each token was, and this many likeliest, 0 to 20."),
    _used("echo", "Begin the answer with the prompt; with logprobs, tell of its tokens too."),
    _refused("suffix", "Text after the gap.", ""),
    _refused("add_special_tokens", "Prompts without them: send token ids.", True),
)


def sort_fields(
    body: Mapping[str, Any], fields: Iterable[Field], *, strict: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Go through what a request says.

    Returns:
        The values of the fields that are used, and the names of fields that nobody knows.

    Raises:
        InvalidRequestError: A field that isn't supported asks for something, or, if ``strict``,
            a field is not known.
    """
    known = {field.name: field for field in fields}
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in body.items():
        field = known.get(name)
        if field is None:
            if strict:
                raise InvalidRequestError(name[:64], "there is no such field")
            unknown.append(name)
        elif value is None or field.use is Use.NO_EFFECT:
            continue
        elif field.use is Use.USED:
            values[name] = value
        elif not any(_same(value, each) for each in field.neutral):
            raise InvalidRequestError(name, f"is not supported: {field.help}")
    return values, tuple(unknown)


def _same(value: object, other: object) -> bool:
    """Equal as JSON: 1 and true are not the same."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def sampling_params(
    values: Mapping[str, Any],
    fields: Iterable[Field],
    defaults: Mapping[str, Any],
    renamed: Mapping[str, str] | None = None,
    **others: Any,
) -> SamplingParams:
    """The sampling settings of a request.

    Args:
        values: What it says.
        fields: Those of its endpoint.
        defaults: What holds where it says nothing.
        renamed: Names in the request by fields of ``SamplingParams``, where they differ.
        others: Settings that were read already; None leaves them to the defaults.

    Raises:
        InvalidRequestError: A value is off; names the field as the request has it.
    """
    given = {f.param: values[f.name] for f in fields if f.param and f.name in values}
    given |= {name: value for name, value in others.items() if value is not None}
    try:
        return SamplingParams(**{**defaults, **given})
    except InvalidRequestError as error:
        raise renamed_error(error, renamed or {}) from error


def renamed_error(error: InvalidRequestError, renamed: Mapping[str, str]) -> InvalidRequestError:
    """The same error about a field by the name that the request has for it."""
    name = renamed.get(error.field)
    if name is None:
        return error
    return type(error)(name, str(error).removeprefix(f"{error.field}: "), hint=error.hint)


def refuse_with_stream(values: Mapping[str, Any], *, stream: bool) -> None:
    """Refuse what a stream has no place for."""
    if stream and "prompt_logprobs" in values:
        raise InvalidRequestError("prompt_logprobs", "doesn't go with stream: true")


def typed(values: Mapping[str, Any], name: str, kind: type[T], default: D) -> T | D:
    """The value of a field, which must be of a type.

    Raises:
        InvalidRequestError: It is of another type.
    """
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidRequestError(name, f"{shown(value)} is not {_KINDS[kind]}")
    return value


def include_usage(values: Mapping[str, Any], *, stream: bool) -> bool:
    """What ``stream_options`` says about a last chunk with token counts.

    Raises:
        InvalidRequestError: It is malformed, or there is no stream.
    """
    if "stream_options" in values and not stream:
        raise InvalidRequestError("stream_options", "goes with stream: true only")
    options: dict[str, Any] = typed(values, "stream_options", dict, {})
    try:
        return typed(options, "include_usage", bool, False)
    except InvalidRequestError as error:
        renamed = {error.field: f"stream_options.{error.field}"}
        raise renamed_error(error, renamed) from error


_KINDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    str: "a string",
    dict: "an object",
    list: "a list",
}
