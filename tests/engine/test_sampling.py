"""Every sampling setting over a real tiny model: equal to a plain reference in any company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx import LLM, SamplingParams
from pagedmlx.core.request import Request
from pagedmlx.core.step import Step
from pagedmlx.engine.outputs import CompletionOutput, Job, PositionLogprobs, RequestOutput
from pagedmlx.engine.runner import ModelRunner
from pagedmlx.errors import RequestFailedError
from pagedmlx.models.adapter import ModelAdapter, ModelOutput
from pagedmlx.sampling.sampler import Sampler, SampleRow
from tests.support.model_zoo import zoo_config
from tests.support.sampling import changed_logits, log_softmax, most_likely
from tests.support.tiny_models import CONFIGS, VOCAB_SIZE, build_model, save_tiny_folder

EOS = (1, 2)
NUM_TOKENS = 12
RNG = np.random.default_rng(8)
SHARED = RNG.integers(6, VOCAB_SIZE, 40).tolist()
SHORT = RNG.integers(6, VOCAB_SIZE, 9).tolist()
PLAIN = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDED = replace(PLAIN, temperature=1.0, top_p=0.9, top_k=40, seed=3)
MIXED: list[tuple[list[int], SamplingParams]] = [
    (SHORT, PLAIN),
    (SHORT, replace(PLAIN, repetition_penalty=1.6)),
    (SHARED, replace(PLAIN, repetition_penalty=3.0, logprobs=2)),
    ([*SHARED, 7], replace(PLAIN, frequency_penalty=2.0, presence_penalty=-1.0)),
    ([*SHARED, 7, 8], replace(SEEDED, presence_penalty=2.0, logprobs=5)),
    (SHARED[:17], replace(PLAIN, logit_bias=dict.fromkeys(range(20, 24), 60))),
    (SHARED[:16], replace(PLAIN, allowed_token_ids=tuple(range(30, 45)), logprobs=0)),
    (SHORT, replace(SEEDED, allowed_token_ids=(5, 6, 7, 8), frequency_penalty=0.5)),
    (SHORT[:3], replace(PLAIN, min_tokens=7, ignore_eos=False, logit_bias={1: 100, 2: 100})),
    ([6], replace(SEEDED, repetition_penalty=0.7, logit_bias={"9": 4.0}, min_p=0.05)),
    (SHORT[:5], replace(PLAIN, bad_words=("a", "bc"), logit_bias={73: 50, 74: 40})),
    (SHARED[:33], replace(SEEDED, prompt_logprobs=3)),
]


@pytest.fixture(params=[0, 1], ids=["in turn", "one ahead"])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many steps are under way when the next one is dispatched."""
    start = ModelRunner.__init__

    def begin(self: ModelRunner, *rest: Any) -> None:
        start(self, *rest)
        self.depth = request.param

    monkeypatch.setattr(ModelRunner, "__init__", begin)
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def open_llm(folder: Path, **settings: Any) -> LLM:
    small = {"block_size": 8, "num_blocks": 400, "pool_fill": float("nan"), "check_integrity": True}
    return LLM(str(folder), **{**small, **settings})


class Reference:
    """The model by mlx-lm alone, a whole pass for each token, and the settings by numpy."""

    def __init__(self, name: str = "llama") -> None:
        self._model: Any = build_model(CONFIGS.get(name) or zoo_config(name))
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, tokens: list[int]) -> np.ndarray:
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = np.array(self._model(mx.array([tokens]))[0])
        return self._known[key]

    def output(self, request: Request, index: int) -> list[int]:
        params, output = request.params, []
        while len(output) < NUM_TOKENS:
            tokens = [*request.prompt_token_ids, *output]
            changed = changed_logits(self.logits(tokens)[-1], request, output)
            row = SampleRow(params, request.seed, index, len(tokens))
            output.append(Sampler().sample(mx.array(changed[None]), [row]).item())
            if output[-1] in request.stop_token_ids:
                break
        return output

    def check(self, llm: LLM, output: RequestOutput, params: SamplingParams) -> None:
        prompt = list(output.prompt_token_ids)
        prepared = llm._worker.prepare(Job(prompt_token_ids=prompt, sampling_params=params))
        request = Request(
            "r",
            tuple(prompt),
            params,
            prepared.stop_token_ids,
            prepared.bad_words,
            seed=params.seed or 0,
        )
        for choice in output.outputs:
            assert list(choice.token_ids) == self.output(request, choice.index)
            self.check_logprobs(prompt, choice, params.logprobs)
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            self.check_prompt(output, params.prompt_logprobs)

    def check_logprobs(
        self, prompt: list[int], choice: CompletionOutput, num_top: int | None
    ) -> None:
        if num_top is None:
            assert choice.logprobs is None
            return
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids)
        for place, entry in enumerate(choice.logprobs):
            logits = self.logits([*prompt, *choice.token_ids[:place]])[-1]
            check_entry(entry, logits, choice.token_ids[place], num_top)

    def check_prompt(self, output: RequestOutput, num_top: int) -> None:
        told, prompt = output.prompt_logprobs, list(output.prompt_token_ids)
        assert told is not None
        assert len(told) == len(prompt)
        assert told[0] is None
        assert output.num_cached_tokens == 0
        logits = self.logits(prompt)
        for place, entry in enumerate(told[1:], 1):
            assert entry is not None
            check_entry(entry, logits[place - 1], prompt[place], num_top)


def check_entry(entry: PositionLogprobs, logits: np.ndarray, token: int, num_top: int) -> None:
    """It is of the model's own logits, whatever the settings make of them."""
    expected = log_softmax(logits)
    assert entry.token.token_id == token
    assert entry.token.logprob == pytest.approx(expected[token], abs=1e-3)
    assert entry.token.rank == 1 + int((logits > logits[token]).sum())
    assert [each.token_id for each in entry.top] == most_likely(logits, num_top)
    assert [each.rank for each in entry.top] == list(range(1, num_top + 1))


def run(llm: LLM, *, n: int = 1) -> list[tuple[RequestOutput, SamplingParams]]:
    params = [replace(each, n=n) for _, each in MIXED]
    return list(zip(llm.generate([prompt for prompt, _ in MIXED], params), params, strict=True))


@pytest.mark.usefixtures("depth")
def test_mixed_settings_equal_the_reference_alone_together_and_from_the_cache(
    folder: Path, reference: Reference
):
    with open_llm(folder) as llm:
        alone = [llm.generate(prompt, params)[0] for prompt, params in MIXED]
        together = run(llm)
        assert sum(output.num_cached_tokens for output, _ in together) > 0
        for output, params in together:
            reference.check(llm, output, params)
        for output, (other, _) in zip(alone, together, strict=True):
            assert [each.token_ids for each in output.outputs] == [
                each.token_ids for each in other.outputs
            ]


@pytest.mark.usefixtures("depth")
def test_mixed_settings_equal_the_reference_with_preemption_and_short_chunks(
    folder: Path, reference: Reference
):
    with open_llm(folder, num_blocks=14, prefill_chunk_size=7, max_num_batched_tokens=24) as llm:
        outputs = run(llm)
        assert llm.stats().num_preemptions > 0
        for output, params in outputs:
            reference.check(llm, output, params)
        assert_nothing_is_kept(llm)


@pytest.mark.usefixtures("depth")
def test_mixed_settings_equal_the_reference_in_forks(folder: Path, reference: Reference):
    with open_llm(folder, num_blocks=60) as llm:
        outputs = run(llm, n=3)
        assert llm.stats().num_copies > 0
        for output, params in outputs:
            reference.check(llm, output, params)
        seeded = [output for output, params in outputs if not params.is_greedy]
        assert all(len({each.token_ids for each in output.outputs}) == 3 for output in seeded)


def assert_nothing_is_kept(llm: LLM) -> None:
    """Of requests that have ended, on the engine's thread."""

    def check() -> None:
        runner: Any = llm._worker.engine._runner
        assert runner._chooser._processors._counts.table is None
        assert runner._chooser._processors._biases == {}
        assert not runner._under_way

    llm._worker.call(check).result()


# Log probabilities.


@pytest.mark.usefixtures("depth")
def test_a_stream_ends_with_what_a_call_returns(folder: Path):
    params = replace(SEEDED, logprobs=4, prompt_logprobs=2, n=2, stop=("\x80", "a"))
    with open_llm(folder) as llm:
        for prompt in (SHORT, SHARED):
            states = list(llm.stream(prompt, params))
            (whole,) = llm.generate(prompt, params)
            assert states[-1].outputs == tuple(
                replace(each, delta=states[-1].outputs[each.index].delta) for each in whole.outputs
            )
            assert states[-1].prompt_logprobs == whole.prompt_logprobs
            for state in states:
                for each in state.outputs:
                    if each.token_ids:
                        assert each.logprobs is not None
                        assert len(each.logprobs) == len(each.token_ids)


@pytest.mark.usefixtures("depth")
def test_prompt_logprobs_are_the_same_cold_cached_and_interrupted(
    folder: Path, reference: Reference
):
    params = replace(PLAIN, prompt_logprobs=5, max_tokens=NUM_TOKENS)
    prompts = [SHARED[:33], SHARED[:33], [*SHARED, *SHORT], SHORT[:1], SHORT[:2]]
    with open_llm(folder) as llm:
        for _ in range(2):
            for output in llm.generate(prompts, params):
                reference.check(llm, output, params)
    for settings in ({"prefill_chunk_size": 5}, {"num_blocks": 9, "max_num_batched_tokens": 20}):
        with open_llm(folder, **settings) as llm:
            outputs = llm.generate([*prompts, *prompts], params)
            for output in outputs:
                reference.check(llm, output, params)


@pytest.mark.usefixtures("depth")
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5"])
def test_settings_hold_for_models_that_run_in_sequence_rows(name: str, tmp_path: Path):
    reference = Reference(name)
    params = [
        replace(PLAIN, prompt_logprobs=2, logprobs=3, repetition_penalty=1.4, n=2),
        replace(PLAIN, frequency_penalty=1.5),
        replace(SEEDED, prompt_logprobs=0, logit_bias={11: 3.0}),
    ]
    with open_llm(save_tiny_folder(tmp_path / "m", name), prefill_chunk_size=6) as llm:
        for _ in range(2):
            outputs = llm.generate([SHARED[:21], SHARED, SHORT], params)
            for output, each in zip(outputs, params, strict=True):
                reference.check(llm, output, each)
        assert_nothing_is_kept(llm)


@pytest.mark.usefixtures("depth")
def test_a_step_never_has_more_prompt_logits_than_the_limit(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    rows: list[int] = []
    run = ModelAdapter.run

    def note(self: ModelAdapter, *rest: Any) -> ModelOutput:
        output = run(self, *rest)
        rows.append(output.logits.shape[0])
        return output

    monkeypatch.setattr("pagedmlx.engine.build.MAX_PROMPT_LOGITS", 6 * VOCAB_SIZE)
    monkeypatch.setattr(ModelAdapter, "run", note)
    params = replace(PLAIN, prompt_logprobs=1)
    with open_llm(folder) as llm:
        rows.clear()
        outputs = llm.generate([SHARED, SHORT, SHARED[:20]], [params, params, PLAIN])
        # Those that sample come on top of the limit.
        assert max(rows) <= 6 + 3
        for output, each in zip(outputs, [params, params, PLAIN], strict=True):
            reference.check(llm, output, each)


def test_log_probabilities_cost_nothing_where_nobody_asks(folder: Path):
    chosen: list[int] = []
    with open_llm(folder) as llm:
        runner: Any = llm._worker.engine._runner
        choose = runner._chooser.choose

        def note(*rest: Any) -> Any:
            result = choose(*rest)
            chosen.append(len(result.arrays))
            return result

        runner._chooser.choose = note
        llm.generate([SHORT, SHARED], [PLAIN, SEEDED])
    assert set(chosen) == {1}


# Many outputs of one request.


@pytest.mark.usefixtures("depth")
def test_sixty_four_outputs_share_the_prompts_blocks_and_differ(folder: Path):
    params = replace(SEEDED, n=64, frequency_penalty=0.3, max_tokens=6)
    with open_llm(folder, num_blocks=200, enable_prefix_caching=False) as llm:
        (output,) = llm.generate(SHARED, params)
        stats = llm.stats()
        # Five blocks of prompt are there once; each output has a block or two of its own.
        assert stats.peak_used_blocks <= 5 + 2 * 64
        assert stats.num_steps < 20
        assert len({each.token_ids for each in output.outputs}) > 60
        assert [each.index for each in output.outputs] == list(range(64))
        few = llm.generate(SHARED, replace(params, n=4))[0]
        assert few.outputs == output.outputs[:4]
        assert_nothing_is_kept(llm)
    with open_llm(folder, num_blocks=24, enable_prefix_caching=False) as llm:
        assert llm.generate(SHARED, params)[0].outputs == output.outputs


# Ends and failures.


@pytest.mark.usefixtures("depth")
def test_end_tokens_are_not_chosen_before_min_tokens(folder: Path):
    wants_to_end = replace(PLAIN, ignore_eos=False, logit_bias={EOS[0]: 100}, logprobs=1)
    with open_llm(folder) as llm:
        for min_tokens in (0, 1, 5):
            params = replace(wants_to_end, min_tokens=min_tokens)
            (choice,) = llm.generate(SHORT, params)[0].outputs
            assert choice.finish_reason == "stop"
            assert len(choice.token_ids) == min_tokens + 1
            assert choice.token_ids[-1] == EOS[0]
            assert EOS[0] not in choice.token_ids[:-1]


@pytest.mark.usefixtures("depth")
def test_bad_words_never_come(folder: Path):
    letters = {llm_id(letter): 40 for letter in "ab"}
    params = replace(SEEDED, logit_bias=letters, max_tokens=60)
    with open_llm(folder) as llm:
        free = llm.generate(SHORT, params)[0].outputs[0].text
        assert "bab" in free
        for words in (("bab",), ("aa", "bb"), ("a",)):
            (choice,) = llm.generate(SHORT, replace(params, bad_words=words))[0].outputs
            assert set(choice.text) <= {"a", "b"}
            assert len(choice.text) == 60
            assert not any(word in choice.text for word in words)


def llm_id(letter: str) -> int:
    """Of the tiny models' tokenizer: six special tokens, then the bytes in the alphabet's order."""
    return ord(letter) - ord("!") + 6


@pytest.mark.usefixtures("depth")
def test_a_request_that_forbids_every_token_fails_alone(folder: Path):
    only = (llm_id("a"),)
    stuck = replace(PLAIN, allowed_token_ids=only, bad_words=("aaa",))
    with open_llm(folder) as llm:
        jobs = [
            Job(prompt_token_ids=SHORT, sampling_params=each, request_id=str(number))
            for number, each in enumerate([stuck, PLAIN, replace(stuck, bad_words=())])
        ]
        outputs = {output.request_id: output for output in llm.generate_iter(jobs)}
        assert isinstance(outputs["0"].error, RequestFailedError)
        assert "no token is left" in str(outputs["0"].error)
        assert outputs["0"].outputs[0].text == "aa"
        assert outputs["1"].error is None
        assert outputs["2"].outputs[0].text == "a" * NUM_TOKENS
        assert_nothing_is_kept(llm)


@pytest.mark.usefixtures("depth")
def test_an_abort_leaves_nothing_behind(folder: Path):
    params = replace(SEEDED, n=3, repetition_penalty=1.5, logit_bias={9: 1}, max_tokens=300)
    with open_llm(folder) as llm:
        for num_states in (1, 4):
            states = llm.stream(SHARED, params)
            for _ in range(num_states):
                next(states)
            states.close()  # type: ignore[attr-defined]
            engine: Any = llm._worker.engine
            while llm._worker.call(lambda engine=engine: engine.has_unfinished).result():
                pass
            assert_nothing_is_kept(llm)


def test_rows_with_penalties_take_one_row_of_counts_each(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    kept: list[int] = []
    dispatch = ModelRunner.dispatch

    def note(self: Any, step: Step) -> None:
        dispatch(self, step)
        table = self._chooser._processors._counts.table
        kept.append(0 if table is None else table.nbytes)

    monkeypatch.setattr(ModelRunner, "dispatch", note)
    params = replace(PLAIN, presence_penalty=0.5)
    with open_llm(folder, max_num_seqs=8) as llm:
        llm.generate([[number + 6] * 5 for number in range(40)], params)
        assert max(kept) == 8 * VOCAB_SIZE * 4
        assert_nothing_is_kept(llm)
