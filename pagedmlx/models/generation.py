"""What a model's generation_config.json asks for: which tokens end an output, and how to sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import InvalidRequestError

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_OTHERS = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "typical_p": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
}
"""Further wishes, each with the value that changes nothing."""

_GGUF_KEYS = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """How a model's maker wants it sampled.

    Attributes:
        values: Fields of ``SamplingParams``, for requests that say nothing about them.
        notes: Lines for the user: what is in force, and what can't be.
    """

    values: Mapping[str, float] = field(default_factory=dict[str, float])
    notes: tuple[str, ...] = ()


def end_token_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """The tokens that a config.json or generation_config.json names as ends: one or a list."""
    found: set[int] = set()
    for part in (config, config.get("text_config") or {}):
        value = part.get("eos_token_id") if isinstance(part, Mapping) else None
        values = value if isinstance(value, list) else [value]
        found.update(v for v in values if isinstance(v, int) and not isinstance(v, bool))
    return frozenset(found)


def generation_config_of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config.json would say, from the keys of a GGUF file."""
    config: dict[str, Any] = {}
    for theirs, ours in _GGUF_KEYS.items():
        value = metadata.get(f"general.sampling.{theirs}")
        # As float32 0.95 is 0.949999988.
        config[ours] = float(f"{value:.6g}") if isinstance(value, float) else value
    return config


def sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Read the sampling settings; a value out of its range is left out and told."""
    if generation_config.get("do_sample") is False:
        return SamplingDefaults({"temperature": 0.0}, ("sampling: greedy by the model's own wish",))
    wishes = {key: generation_config.get(key) for key in (*_SAMPLING, *_OTHERS)}
    if generation_config.get("do_sample") is True and wishes["temperature"] is None:
        wishes["temperature"] = SamplingParams().temperature
    known = {each.name for each in dataclasses.fields(SamplingParams)}
    values: dict[str, float] = {}
    notes: list[str] = []
    for key, value in wishes.items():
        if value is None or value == _OTHERS.get(key):
            continue
        if key not in known:
            notes.append(
                f"sampling: the model's {key} {value!r} is not applied: no such setting yet"
            )
            continue
        try:
            SamplingParams(**{key: value})
        except InvalidRequestError as error:
            notes.append(f"sampling: the model's generation_config is not followed: {error}")
        else:
            values[key] = value
    if values:
        text = ", ".join(f"{key} {value:g}" for key, value in values.items())
        notes.insert(0, f"sampling: {text}, by the model's own wish unless given")
    return SamplingDefaults(values, tuple(notes))
