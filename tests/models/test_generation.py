from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedmlx import LLM, SamplingParams
from pagedmlx.models.generation import end_token_ids, sampling_defaults
from pagedmlx.models.loader import load_model
from tests.support.gguf_writer import FLOAT32, INT32, tiny_llama_gguf
from tests.support.tiny_models import save_tiny_folder


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "pad_token_id": 0}, {}),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": True, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        ({"temperature": None, "min_p": 0.1}, {"min_p": 0.1}),
    ],
)
def test_the_makers_sampling_settings_are_read(
    config: dict[str, Any], values: dict[str, float]
) -> None:
    found = sampling_defaults(config)
    assert found.values == values
    assert bool(found.notes) == bool(values)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"temperature": -1}, "temperature: -1 must be"),
        ({"top_p": "high"}, "top_p: 'high' is not a number"),
        ({"top_k": 2.5}, "top_k: 2.5 is not a whole number"),
        ({"temperature": True}, "temperature: True is not a number"),
        ({"num_beams": 4}, "num_beams 4 is not applied"),
    ],
)
def test_what_cannot_be_followed_is_told_and_left_out(config: dict[str, Any], words: str) -> None:
    found = sampling_defaults({**config, "min_p": 0.2, "repetition_penalty": 1.0})
    assert found.values == {"min_p": 0.2}
    shown, reason = found.notes
    assert shown == "sampling: min_p 0.2, by the model's own wish unless given"
    assert words in reason


def test_a_gguf_file_may_name_its_sampling_settings_too(tmp_path: Path) -> None:
    file, _ = tiny_llama_gguf()
    assert load_model(file.write(tmp_path / "m.gguf")).sampling.values == {}
    file.metadata["general.sampling.temp"] = (FLOAT32, 0.7)
    file.metadata["general.sampling.top_k"] = (INT32, 20)
    file.metadata["general.sampling.top_p"] = (FLOAT32, 0.95)
    loaded = load_model(file.write(tmp_path / "m.gguf"))
    assert loaded.sampling.values == {"temperature": 0.7, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, set()),
        ({"eos_token_id": None}, set()),
        ({"eos_token_id": 2}, {2}),
        ({"eos_token_id": [2, 3, 3]}, {2, 3}),
        ({"eos_token_id": [2, "x", True, None]}, {2}),
        ({"text_config": {"eos_token_id": [5]}, "eos_token_id": 1}, {1, 5}),
    ],
)
def test_ends_of_the_output_are_one_or_many(config: dict[str, Any], ids: set[int]) -> None:
    assert end_token_ids(config) == ids


def test_a_call_without_params_follows_the_maker_and_params_win(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "model")
    wishes = {"eos_token_id": [1, 2], "temperature": 0.5, "top_k": 1}
    (folder / "generation_config.json").write_text(json.dumps(wishes))
    with LLM(folder, num_blocks=32, seed=1) as llm:
        assert llm.sampling_defaults == {"temperature": 0.5, "top_k": 1}
        assert llm.default_sampling_params == SamplingParams(temperature=0.5, top_k=1)
        assert "sampling: temperature 0.5, top_k 1, by the model's own wish" in llm.load_notes[-1]
        # With top_k 1 sampling is greedy; with the defaults of SamplingParams it is not.
        default = [llm.generate("hello")[0].outputs[0].text for _ in range(2)]
        greedy = llm.generate("hello", SamplingParams(temperature=0))[0].outputs[0].text
        assert default == [greedy, greedy]
        (streamed,) = list(llm.stream("hello"))[-1].outputs
        assert streamed.text == greedy
        assert llm.generate("hello", SamplingParams(seed=3))[0].outputs[0].text != greedy
