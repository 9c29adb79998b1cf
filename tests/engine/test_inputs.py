from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.engine.inputs import MAX_PRIORITY, EngineLimits, PreparedJob, prepare_job
from pagedmlx.engine.outputs import Job
from pagedmlx.errors import ContextLengthError, InvalidRequestError, PoolTooSmallError
from tests.support.engines import EOS, VOCAB_SIZE, make_engine, run_jobs
from tests.support.tokenizers import byte_ids, byte_tokenizer

LIMITS = EngineLimits(max_model_len=100, capacity_tokens=64, block_size=4, vocab_size=VOCAB_SIZE)


def prepare(limits: EngineLimits = LIMITS, **fields: Any) -> PreparedJob:
    return prepare_job(Job(**fields), byte_tokenizer(), limits)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [5]}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": b"a"}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "pirate", "content": "a"}]}, "messages[0].role"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": 7}, "prompt_token_ids"),
        ({"prompt_token_ids": np.array(7)}, "prompt_token_ids"),
        ({"prompt_token_ids": np.array([[5]])}, "prompt_token_ids"),
        ({"prompt_token_ids": np.array([True])}, "prompt_token_ids"),
        ({"prompt_token_ids": np.array([5.0])}, "prompt_token_ids"),
        ({"prompt_token_ids": np.array([2**64 - 1], np.uint64)}, "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"prompt_token_ids": b"abc"}, "prompt_token_ids"),
        ({"prompt_token_ids": [5, -1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5, VOCAB_SIZE]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5, 2**70]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5, True]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5, 6.0]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5, "a"]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5, None]}, "prompt_token_ids"),
        ({"prompt_token_ids": [[5]]}, "prompt_token_ids"),
        ({"prompt": "a", "sampling_params": None}, "sampling_params"),
        ({"prompt": "a", "sampling_params": {"n": 1}}, "sampling_params"),
        ({"prompt": "a", "request_id": 5}, "request_id"),
        ({"prompt": "a", "cache_salt": None}, "cache_salt"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt"),
        ({"prompt": "a", "priority": True}, "priority"),
        ({"prompt": "a", "priority": 1.0}, "priority"),
        ({"prompt": "a", "priority": MAX_PRIORITY + 1}, "priority"),
        ({"prompt": "a", "priority": -MAX_PRIORITY - 1}, "priority"),
        ({"prompt": "a", "chat_template_kwargs": None}, "chat_template_kwargs"),
        ({"prompt": "a", "chat_template_kwargs": {5: 1}}, "chat_template_kwargs"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], field: str):
    with pytest.raises(InvalidRequestError) as caught:
        prepare(**fields)
    assert caught.value.field == field
    assert caught.value.http_status == 400
    assert "\n" not in str(caught.value)


def test_a_stop_token_outside_the_vocabulary_is_refused_with_the_limit():
    params = SamplingParams(stop_token_ids=(VOCAB_SIZE,))
    with pytest.raises(InvalidRequestError, match=f"stop_token_ids: {VOCAB_SIZE} .*below"):
        prepare(prompt="a", sampling_params=params)


def test_tokens_of_a_text_that_the_model_does_not_have_are_refused():
    narrow = EngineLimits(max_model_len=100, capacity_tokens=64, block_size=4, vocab_size=50)
    with pytest.raises(InvalidRequestError, match=r"prompt: .* below 50"):
        prepare(narrow, prompt="\xff")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {str(VOCAB_SIZE): 5}),
        ("logit_bias", {999999999: 5}),
        ("allowed_token_ids", (5, VOCAB_SIZE)),
        ("bad_words", ("a", "\ud800")),
    ],
)
def test_tokens_and_words_that_the_model_does_not_have_are_refused(field: str, value: Any):
    with pytest.raises(InvalidRequestError) as caught:
        prepare(prompt="a", sampling_params=SamplingParams(**{field: value}))
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_bad_words_are_forbidden_both_alone_and_after_a_space():
    params = SamplingParams(bad_words=("the", " fox", "a b"))
    tokenizer = byte_tokenizer()
    expected = [tokenizer.encode(text) for text in ("the", " the", "fox", " fox", "a b", " a b")]
    assert prepare(prompt="a", sampling_params=params).bad_words == tuple(map(tuple, expected))


def test_end_tokens_beyond_the_models_vocabulary_are_passed_over():
    narrow = EngineLimits(max_model_len=100, capacity_tokens=64, block_size=4, vocab_size=EOS)
    assert prepare(narrow, prompt_token_ids=[0]).stop_token_ids == frozenset()


def test_a_minimum_that_only_end_tokens_could_reach_is_refused():
    params = SamplingParams(allowed_token_ids=(EOS,), min_tokens=1)
    with pytest.raises(InvalidRequestError, match="min_tokens: before 1 tokens"):
        prepare(prompt="a", sampling_params=params)
    for others in ({"min_tokens": 0}, {"ignore_eos": True}, {"allowed_token_ids": (EOS, 9)}):
        prepare(prompt="a", sampling_params=replace(params, **others))


def test_every_prompt_form_gives_the_same_tokens():
    ids = byte_ids(b"hello")
    forms: list[dict[str, Any]] = [
        {"prompt": "hello"},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": tuple(ids)},
        {"prompt_token_ids": iter(ids)},
        {"prompt_token_ids": np.array(ids)},
    ]
    for form in forms:
        prepared = prepare(**form)
        assert prepared.prompt_token_ids == tuple(ids)
        assert all(type(token) is int for token in prepared.prompt_token_ids)
        assert prepared.packed_prompt.tolist() == ids


def test_messages_are_written_by_the_template():
    prepared = prepare(messages=[{"role": "user", "content": "hi"}])
    text = byte_tokenizer().decode(prepared.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_missing_id_is_made_up_and_unique():
    assert prepare(prompt="a").request_id != prepare(prompt="a").request_id
    assert prepare(prompt="a", request_id="mine").request_id == "mine"


def test_the_models_end_tokens_stop_unless_ignored():
    params = SamplingParams(stop_token_ids=(7,))
    assert prepare(prompt="a", sampling_params=params).stop_token_ids >= {7, EOS}
    params = SamplingParams(stop_token_ids=(7,), ignore_eos=True)
    assert prepare(prompt="a", sampling_params=params).stop_token_ids == {7}


@pytest.mark.parametrize(
    ("max_model_len", "num_prompt", "max_tokens", "resolved"),
    [
        (100, 10, None, 55),  # the pool holds 64, and the last token needs no slot
        (100, 10, 10**9, 55),
        (100, 10, 90, 55),
        (100, 10, 89, 89),  # definite: left for the scheduler to refuse
        (100, 10, 7, 7),
        (40, 10, None, 30),
        (40, 10, 31, 30),
        (40, 39, None, 1),
        (100, 64, None, 1),
    ],
)
def test_open_and_huge_max_tokens_are_cut_to_what_fits(
    max_model_len: int, num_prompt: int, max_tokens: int | None, resolved: int
):
    limits = EngineLimits(max_model_len, 64, 4, VOCAB_SIZE)
    params = SamplingParams(max_tokens=max_tokens)
    prepared = prepare(limits, prompt_token_ids=[5] * num_prompt, sampling_params=params)
    assert prepared.params.max_tokens == resolved


def test_min_tokens_is_cut_to_the_room_too():
    params = SamplingParams(max_tokens=None, min_tokens=10**6)
    prepared = prepare(prompt="abc", sampling_params=params)
    assert prepared.params.min_tokens == prepared.params.max_tokens == 62


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused_with_the_numbers():
    limits = EngineLimits(40, 64, 4, VOCAB_SIZE)
    with pytest.raises(ContextLengthError, match="has 40 tokens; the context of 40"):
        prepare(limits, prompt="x" * 40)


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers():
    with pytest.raises(PoolTooSmallError, match=r"65 tokens.*holds 64 \(16 blocks of 4\)"):
        prepare(prompt="x" * 65)


def test_a_request_that_can_never_fit_is_refused_and_the_next_one_runs():
    engine = make_engine(num_blocks=4)
    with pytest.raises(PoolTooSmallError, match="5 blocks of 4, the pool has 4"):
        engine.add_request(Job(prompt="abc", sampling_params=SamplingParams(max_tokens=15)))
    assert not engine.has_unfinished
    engine.check_integrity()
    params = SamplingParams(temperature=0.0, max_tokens=14)
    (output,) = run_jobs(engine, [Job(prompt="abc", sampling_params=params)])
    assert len(output.outputs[0].token_ids) == 14
