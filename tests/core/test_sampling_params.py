from __future__ import annotations

from typing import Any

import pytest

from pagedmlx.core.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from pagedmlx.errors import InvalidRequestError

NAN = float("nan")
INF = float("inf")

BAD: list[tuple[str, Any]] = [
    *[("n", value) for value in (0, -1, MAX_N + 1, 1.0, "2", True, None)],
    *[("temperature", value) for value in (-1, -1e-9, 1e9, NAN, INF, "NaN", True, None)],
    *[("top_p", value) for value in (0, 0.0, -0.1, 1.1, NAN, "1", False)],
    *[("top_k", value) for value in (-2, 1.5, "4", True)],
    *[("min_p", value) for value in (-0.1, 1.01, NAN, "0", True)],
    *[("seed", value) for value in (1.5, "7", 2**64, -(2**63) - 1, True)],
    *[("max_tokens", value) for value in (0, -1, 1.5, "5", True)],
    *[("min_tokens", value) for value in (-1, 257, 0.0, False)],
    *[("stop", value) for value in (1, [1], ["x", None], {"x": 1}, ["x"] * (MAX_STOP_STRINGS + 1))],
    *[("stop_token_ids", value) for value in (5, "5", [-1], [1.0], [True], ["a"])],
    *[("repetition_penalty", value) for value in (0, 1e-10, -1, 101, NAN, "1", True, None)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, NAN, INF, "0", None)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN, INF, "0", None)],
    *[("logprobs", value) for value in (-1, 21, 1.0, "5", True)],
    *[("prompt_logprobs", value) for value in (-1, 21, 1.0, "5", False)],
    *[("logit_bias", {key: 1.0}) for key in (-1, "-1", "abc", "", 1.5, True, None, "1" * 50)],
    *[("logit_bias", {"5": bias}) for bias in (-101, 100.5, NAN, "1", None, True)],
    *[("logit_bias", value) for value in (5, "5", [5], [(5,)], [[5, 1.0]])],
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    *[("allowed_token_ids", value) for value in ((), [], 5, [-1], ["a"], "abc")],
    *[("bad_words", value) for value in (5, [5], [""], ["a", " "], ["x"] * (MAX_BAD_WORDS + 1))],
    *[("include_stop_str_in_output", value) for value in (None, 1)],
    *[("ignore_eos", value) for value in (None, 1, "yes")],
    *[("skip_special_tokens", value) for value in (None, 0)],
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert caught.value.http_status == 400
    assert str(caught.value).startswith(f"{field}: ")
    assert "\n" not in str(caught.value)


GOOD: list[tuple[str, Any]] = [
    ("n", MAX_N),
    ("temperature", 0),
    ("temperature", 1e-9),
    ("temperature", 100),
    ("top_p", 1),
    ("top_p", 1e-9),
    ("top_k", 0),
    ("top_k", -1),
    ("top_k", 10**9),
    ("min_p", 1.0),
    ("seed", 2**64 - 1),
    ("seed", -(2**63)),
    ("max_tokens", 1),
    ("max_tokens", 10**12),
    ("max_tokens", None),
    ("min_tokens", 256),
    ("repetition_penalty", 1e-9),
    ("repetition_penalty", 100),
    ("presence_penalty", -2),
    ("frequency_penalty", 2.0),
    ("logprobs", 0),
    ("logprobs", 20),
    ("prompt_logprobs", 20),
    ("prompt_logprobs", None),
]


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_the_ends_of_a_range_are_part_of_it(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize("stop", ["", [""], [], (), None])
def test_empty_stop_strings_are_ignored(stop: Any) -> None:
    assert SamplingParams(stop=stop).stop == ()


def test_stop_takes_a_string_or_a_list_and_keeps_each_once() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["", "x", "y", "x"]).stop == ("x", "y")  # type: ignore[arg-type]
    assert len(SamplingParams(stop=tuple(map(str, range(50)))).stop) == 50


def test_stop_token_ids_take_any_collection() -> None:
    assert SamplingParams(stop_token_ids=[2, 1]).stop_token_ids == (2, 1)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids={7}).stop_token_ids == (7,)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]


def test_logit_bias_takes_a_mapping_with_keys_as_json_has_them() -> None:
    for value in ({"7": 1, 3: -100}, [(3, -100.0), (7, 1.0)], ((7, 1), (3, -100))):
        params = SamplingParams(logit_bias=value)  # type: ignore[arg-type]
        assert params.logit_bias == ((3, -100.0), (7, 1.0))
    assert SamplingParams(logit_bias=None).logit_bias == ()  # type: ignore[arg-type]
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(301), 1)).logit_bias) == 301  # type: ignore[arg-type]


def test_lists_of_tokens_and_words_are_kept_once_each() -> None:
    params = SamplingParams(allowed_token_ids=[5, 1, 5], bad_words=["a", "b", "a"])  # type: ignore[arg-type]
    assert params.allowed_token_ids == (1, 5)
    assert params.bad_words == ("a", "b")
    assert SamplingParams(bad_words="ab").bad_words == ("ab",)  # type: ignore[arg-type]
    assert hash(params) == hash(SamplingParams(allowed_token_ids=(1, 5), bad_words=("a", "b")))


def test_zero_temperature_is_greedy_whatever_else_is_set() -> None:
    assert SamplingParams(temperature=0, top_p=0.1, top_k=5, min_p=0.5, seed=3).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy


def test_min_tokens_has_no_upper_limit_without_max_tokens() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6
