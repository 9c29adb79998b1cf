"""Outputs that follow a grammar, over a real tiny model with random weights, in any company."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedmlx import LLM, SamplingParams
from pagedmlx.core.structured import StructuredOutputs
from pagedmlx.engine.outputs import Job
from pagedmlx.engine.runner import ModelRunner
from pagedmlx.errors import InvalidRequestError, NoTokenLeftError
from tests.support.engines import make_engine
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_folder

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(6, 262, size).tolist() for size in (30, 9, 17, 33, 5, 12)]
PLAIN = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = replace(PLAIN, temperature=1.0, seed=5, max_tokens=120)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}


def like(base: SamplingParams = SEEDED, /, **fields: Any) -> SamplingParams:
    """The settings with a grammar in place of the model's will."""
    return replace(base, ignore_eos=False, structured=StructuredOutputs(**fields))


MIXED = [
    (PROMPTS[0], PLAIN),
    (PROMPTS[1], like(json_schema=SCHEMA)),
    (PROMPTS[2], replace(PLAIN, temperature=1.0, top_k=30, seed=8)),
    (PROMPTS[3], like(regex=r"[a-z]{3,9}( \d{1,3}){2}")),
    (PROMPTS[4], replace(PLAIN, repetition_penalty=1.5)),
    (PROMPTS[5], like(replace(PLAIN, repetition_penalty=1.3), choice=("yes", "no", "north"))),
    (PROMPTS[0], like(replace(SEEDED, top_p=0.9, max_tokens=20), json_schema=SCHEMA, after="é")),
    (PROMPTS[1], like(replace(SEEDED, logprobs=2), grammar='start: "<" /[^>]{1,5}/ ">"')),
]


@pytest.fixture(params=[0, 1], ids=["in turn", "one ahead"])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many steps are under way when the next one is dispatched."""
    begin = ModelRunner.__init__

    def start(self: ModelRunner, *rest: Any) -> None:
        begin(self, *rest)
        self.depth = request.param

    monkeypatch.setattr(ModelRunner, "__init__", start)
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("model"))


def open_llm(folder: Path, **settings: Any) -> LLM:
    small = {"block_size": 8, "num_blocks": 300, "pool_fill": float("nan"), "check_integrity": True}
    return LLM(str(folder), **{**small, **settings})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm


def texts(llm: LLM, jobs: list[tuple[list[int], SamplingParams]], n: int = 1) -> list[Any]:
    params = [replace(each, n=n) for _, each in jobs]
    outputs = llm.generate([prompt for prompt, _ in jobs], params)
    return [[(c.text, c.token_ids, c.finish_reason) for c in each.outputs] for each in outputs]


def assert_nothing_is_kept(llm: LLM) -> None:
    def check() -> None:
        runner: Any = llm._worker.engine._runner
        assert runner._chooser._grammars._states == {}
        assert not runner._under_way

    llm._worker.call(check).result()


# In company.


@pytest.mark.usefixtures("depth")
def test_what_an_output_is_does_not_depend_on_its_company(folder: Path):
    plain = [job for job in MIXED if job[1].structured is None]
    with open_llm(folder) as llm:
        alone = [texts(llm, [job])[0] for job in MIXED]
        together = texts(llm, MIXED)
        assert together == alone
        assert texts(llm, plain) == [
            t for t, job in zip(together, MIXED, strict=True) if job in plain
        ]
        assert_nothing_is_kept(llm)
    (((text, _, reason),), ((words, _, _),), ((word, _, _),), _, ((mark, _, _),)) = (
        together[1],
        together[3],
        together[5],
        together[6],
        together[7],
    )
    jsonschema.validate(json.loads(text), SCHEMA)
    assert reason == "stop"
    assert re.fullmatch(r"[a-z]{3,9}( \d{1,3}){2}", words)
    assert word in ("yes", "no", "north")
    assert re.fullmatch("<[^>]{1,5}>", mark)


@pytest.mark.usefixtures("depth")
def test_nor_on_preemption_and_short_chunks(folder: Path):
    with open_llm(folder) as llm:
        expected = texts(llm, MIXED)
    with open_llm(folder, num_blocks=26, prefill_chunk_size=7, max_num_batched_tokens=24) as llm:
        assert texts(llm, MIXED) == expected
        assert llm.stats().num_preemptions > 0
        assert_nothing_is_kept(llm)


@pytest.mark.usefixtures("depth")
def test_forks_follow_the_grammar_each_in_its_own_way(folder: Path):
    with open_llm(folder, num_blocks=60, enable_prefix_caching=False) as llm:
        few = texts(llm, MIXED, n=2)
        outputs = texts(llm, [(PROMPTS[1], like(json_schema=SCHEMA))], n=8)[0]
        assert outputs[:2] == few[1]
        assert len({text for text, _, _ in outputs}) > 4
        for text, _, reason in outputs:
            assert reason == "stop"
            jsonschema.validate(json.loads(text), SCHEMA)
        assert_nothing_is_kept(llm)


def test_only_sequences_with_a_grammar_wait_to_be_read(folder: Path, monkeypatch: Any):
    unread: list[tuple[bool, bool]] = []
    dispatch = ModelRunner.dispatch

    def note(self: ModelRunner, step: Any) -> None:
        self.depth = 1
        for entry in step.scheduled:
            if entry.num_tokens == 1:
                has_grammar = entry.sequence.request.grammar is not None
                unread.append((has_grammar, entry.is_unread))
        dispatch(self, step)

    monkeypatch.setattr(ModelRunner, "dispatch", note)
    with open_llm(folder) as llm:
        texts(llm, MIXED[:4])
    assert {is_unread for has_grammar, is_unread in unread if has_grammar} == {False}
    assert {is_unread for has_grammar, is_unread in unread if not has_grammar} == {True}


def test_nothing_is_kept_of_a_request_that_was_left(folder: Path):
    with open_llm(folder) as llm:
        for _ in range(3):
            stream = llm.stream(PROMPTS[0], like(regex="[ab]{1000}"))
            next(stream)
            stream.close()
        llm.generate(PROMPTS[1], PLAIN)
        assert_nothing_is_kept(llm)
        assert llm.stats().num_used_blocks == 0


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5"])
def test_nor_on_how_the_model_lays_out_its_rows(name: str, tmp_path: Path):
    with open_llm(save_tiny_folder(tmp_path / "m", name), prefill_chunk_size=6) as llm:
        together = texts(llm, MIXED[:3])
        assert texts(llm, MIXED[1:2]) == together[1:2]
        jsonschema.validate(json.loads(together[1][0][0]), SCHEMA)
        assert_nothing_is_kept(llm)


# Whatever is said is valid.

_LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[xy]{1,3}$"},
        {"enum": ["a", 2, None, {"b": []}]},
        {"type": "string", "format": "date"},
    ]
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from(["a", "b", "é"]), inner, max_size=3).flatmap(
        lambda named: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(named),
                "required": st.lists(st.sampled_from(sorted(named)), unique=True)
                if named
                else st.just([]),
                "additionalProperties": st.just(False),
            }
        )
    )


SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner, "maxItems": st.integers(0, 2)}
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
    ),
    max_leaves=4,
)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(schemas=st.lists(SCHEMAS, min_size=4, max_size=4), seed=st.integers(0, 99))
def test_any_schema_gets_json_that_it_allows(llm: LLM, schemas: list[Any], seed: int):
    params = [like(replace(SEEDED, seed=seed, max_tokens=400), json_schema=s) for s in schemas]
    for schema, output in zip(schemas, llm.generate(PROMPTS[:4], params), strict=True):
        assert output.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(output.outputs[0].text), schema)


# Beside other settings.


def one(llm: LLM, params: SamplingParams) -> Any:
    return llm.generate(PROMPTS[1], params)[0].outputs[0]


def test_the_models_end_is_chosen_only_where_the_grammar_is_satisfied(llm: LLM):
    wants_to_end = {"logit_bias": {1: 100, 2: 100}}
    end = one(llm, like(replace(SEEDED, **wants_to_end), regex="ab{2,9}"))
    assert (end.text, end.finish_reason, end.stop_reason) == ("abb", "stop", None)
    goes_on = one(
        llm, replace(like(replace(SEEDED, **wants_to_end), regex="ab{2,9}"), ignore_eos=True)
    )
    assert (goes_on.text, goes_on.finish_reason) == ("abbbbbbbbb", "stop")
    for min_tokens, text in ((2, "abb"), (6, "abbbbb"), (50, "abbbbbbbbb")):
        params = replace(
            like(replace(SEEDED, **wants_to_end), regex="ab{2,9}"), min_tokens=min_tokens
        )
        assert one(llm, params).text == text


def test_an_empty_output_is_possible(llm: LLM):
    empty = one(llm, like(regex=""))
    assert (empty.text, empty.finish_reason) == ("", "stop")


def test_max_tokens_cut_an_output_and_say_so(llm: LLM):
    cut = one(llm, replace(like(regex="a{50}"), max_tokens=7))
    assert (cut.text, cut.finish_reason) == ("aaaaaaa", "length")
    whole = one(llm, replace(like(regex="a{7}"), max_tokens=7))
    assert (whole.text, whole.finish_reason) == ("aaaaaaa", "stop")


def test_stop_strings_and_tokens_end_an_output_in_the_middle(llm: LLM):
    stopped = one(llm, replace(like(regex="abcabc"), stop=("ca",)))
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("ab", "stop", "ca")
    token = llm._worker.engine.tokenizer.encode("c")[0]
    stopped = one(llm, replace(like(regex="abcabc"), stop_token_ids=(token,)))
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("ab", "stop", token)


def test_biases_penalties_and_filters_choose_among_what_the_grammar_allows(llm: LLM):
    encode = llm._worker.engine.tokenizer.encode
    (a,), (b,), (z,) = encode("a"), encode("b"), encode("z")
    biased = like(replace(SEEDED, logit_bias={z: 100, b: 60}), regex="[ab]{6}")
    assert one(llm, biased).text == "bbbbbb"
    forbidden = like(replace(SEEDED, bad_words=("b",)), regex="[ab]{6}")
    assert one(llm, forbidden).text == "aaaaaa"
    only = like(replace(SEEDED, allowed_token_ids=(a, z)), regex="[ab]{6}")
    assert one(llm, only).text == "aaaaaa"
    for filters in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"temperature": 100.0}):
        assert re.fullmatch(
            "[ab]{6}", one(llm, like(replace(SEEDED, **filters), regex="[ab]{6}")).text
        )


def test_log_probabilities_are_the_models_own(llm: LLM):
    told = one(llm, like(replace(SEEDED, logprobs=3), choice=("yes",))).logprobs
    first = one(llm, replace(PLAIN, logprobs=3)).logprobs[0]
    assert told[0].top == first.top
    assert told[0].token.logprob < first.top[0].logprob


def test_the_text_is_the_grammars_where_tokenizers_drop_a_first_blank(llm: LLM):
    assert (
        llm.chat([{"role": "user", "content": "x"}], like(regex=" a b"))[0].outputs[0].text
        == " a b"
    )


# What goes wrong.


def test_settings_that_leave_no_token_end_their_own_request(folder: Path):
    with open_llm(folder) as llm:
        expected = texts(llm, MIXED[:4])
        impossible = like(replace(SEEDED, bad_words=("b",)), regex="ab")
        jobs = [
            Job(prompt_token_ids=p, sampling_params=s)
            for p, s in [*MIXED[:4], (PROMPTS[0], impossible)]
        ]
        outputs = {
            o.request_id: o
            for o in llm.generate_iter(replace(j, request_id=str(i)) for i, j in enumerate(jobs))
        }
        error = outputs["4"].error
        assert isinstance(error, NoTokenLeftError)
        assert "grammar" in error.hint
        found = [
            [(c.text, c.token_ids, c.finish_reason) for c in outputs[str(i)].outputs]
            for i in range(4)
        ]
        assert found == expected
        assert_nothing_is_kept(llm)


def test_a_grammar_that_makes_no_sense_is_refused_before_anything_runs(llm: LLM):
    with pytest.raises(InvalidRequestError, match="json_schema"):
        llm.generate(PROMPTS[:2], [PLAIN, like(json_schema=False)])
    assert llm.stats().num_running == 0


def test_an_engine_without_grammars_says_so():
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="follows no grammars"):
        engine.prepare(Job(prompt="x", sampling_params=like(regex="a")))


def test_unused_places_of_the_vocabulary_are_never_chosen(llm: LLM):
    bias = dict.fromkeys(range(262, VOCAB_SIZE), 100)
    assert (
        one(llm, like(replace(SEEDED, logit_bias=bias), regex="(?s:.{4})")).finish_reason == "stop"
    )
