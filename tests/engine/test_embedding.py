"""Embeddings equal a plain forward and pooling, whatever goes on beside them in the engine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx import LLM, SamplingParams
from pagedmlx.core.step import Step
from pagedmlx.engine.outputs import EmbeddingParams, Job, RequestOutput
from pagedmlx.engine.runner import ModelRunner
from pagedmlx.errors import (
    ContextLengthError,
    InvalidRequestError,
    PoolTooSmallError,
    RequestFailedError,
)
from tests.support.embedding_model import EOS, PlainEmbedder, save_embedding_folder
from tests.support.engines import run_jobs
from tests.support.tiny_models import save_tiny_folder

RNG = np.random.default_rng(6)
SHARED = RNG.integers(6, 120, 40).tolist()
PROMPTS = [
    SHARED,
    [*SHARED, 9],
    [*SHARED[:32], *RNG.integers(6, 120, 30).tolist()],
    SHARED[:7],
    [11],
    [11, 12],
    RNG.integers(6, 120, 61).tolist(),
    SHARED,
]
MODES = ("lasttoken", "mean_tokens", "cls_token")
ALL = EmbeddingParams()
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("embedding")
    return {mode: save_embedding_folder(base / mode, mode) for mode in MODES}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many steps are under way when the next one is dispatched."""
    start = ModelRunner.__init__

    def begin(self: ModelRunner, *rest: Any) -> None:
        start(self, *rest)
        self.depth = request.param

    monkeypatch.setattr(ModelRunner, "__init__", begin)
    return request.param


def open_llm(folder: Path, **settings: Any) -> LLM:
    small = {"num_blocks": 64, "max_model_len": 256, "check_integrity": True}
    return LLM(folder, **{**small, **settings})


def check(found: list[Any], plain: PlainEmbedder, prompts: list[list[int]]) -> None:
    for vector, prompt in zip(found, prompts, strict=True):
        assert vector.dtype == np.float32
        np.testing.assert_allclose(vector, plain(prompt), atol=2e-6)


@pytest.mark.usefixtures("depth")
@pytest.mark.parametrize(
    ("settings", "depth"),
    [
        ({}, 1),
        ({"prefill_chunk_size": 7}, 0),
        ({"num_blocks": 9, "max_num_batched_tokens": 20, "block_size": 8}, 1),
    ],
    ids=["whole", "chunks of 7", "a tight pool"],
    indirect=["depth"],
)
def test_embeddings_are_those_of_a_plain_forward_in_any_company(
    folders: dict[str, Path], mode: str, settings: dict[str, Any]
):
    plain = PlainEmbedder(folders[mode], mode)
    with open_llm(folders[mode], **settings) as llm:
        for _ in range(2):
            check(llm.embed(PROMPTS), plain, PROMPTS)
        alone = [llm.embed([prompt])[0] for prompt in PROMPTS[:3]]
        check(alone, plain, PROMPTS[:3])
        assert llm.stats().num_used_blocks == 0


def test_the_last_tokens_state_needs_the_last_token_only(folders: dict[str, Path]):
    def computed(mode: str) -> int:
        with open_llm(folders[mode]) as llm:
            llm.embed([SHARED])
            before = llm.stats().num_computed_tokens
            llm.embed([SHARED])
            return llm.stats().num_computed_tokens - before

    assert computed("lasttoken") < 16
    assert computed("mean_tokens") == computed("cls_token") == len(SHARED)


@pytest.mark.usefixtures("depth")
@pytest.mark.parametrize(
    ("mode", "depth"),
    [("lasttoken", 1), ("mean_tokens", 0), ("mean_tokens", 1)],
    indirect=["depth"],
)
def test_embeddings_survive_being_preempted_by_text_and_leave_it_as_it_is(
    folders: dict[str, Path], mode: str
):
    plain = PlainEmbedder(folders[mode], mode)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    texts = [
        Job(prompt_token_ids=each, sampling_params=params, priority=1) for each in ([11], [12, 13])
    ]
    # A token at a time, so that the texts' blocks run out while it is computed.
    settings = {"block_size": 4, "num_blocks": 26, "prefill_chunk_size": 1}
    with open_llm(folders[mode], **settings, enable_prefix_caching=False) as llm:
        engine = llm._worker.engine

        def run(jobs: list[Job]) -> list[RequestOutput]:
            return llm._worker.call(partial(run_jobs, engine, jobs)).result()

        alone = [run([text])[0] for text in texts]
        embedded, *written = run([Job(prompt_token_ids=SHARED, embedding=ALL), *texts])
        assert embedded.metrics.num_preemptions > 0
        assert embedded.embedding is not None
        check([embedded.embedding], plain, [SHARED])
        assert [each.outputs for each in written] == [each.outputs for each in alone]
        assert (embedded.outputs[0].token_ids, embedded.outputs[0].finish_reason) == ((), "stop")


def test_a_text_is_tokenized_with_the_end_that_the_tokenizer_adds(folders: dict[str, Path]):
    plain = PlainEmbedder(folders["lasttoken"])
    with open_llm(folders["lasttoken"]) as llm:
        tokenizer = llm._worker.engine.tokenizer
        ids = tokenizer.encode("hello")
        assert (len(ids), ids[-1]) == (6, EOS)
        check(llm.embed("hello"), plain, [ids])
        check(llm.embed([ids[:-1], "hello"]), plain, [ids[:-1], ids])
        assert llm.embed([]) == []


def test_nothing_is_computed_of_logits_that_nobody_wants(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    with open_llm(folders["mean_tokens"]) as llm:
        runner: Any = llm._worker.engine._runner
        shapes: list[tuple[int, ...]] = []
        choose = runner._chooser.choose

        def note(logits: mx.array, *rest: Any) -> Any:
            shapes.append(logits.shape)
            return choose(logits, *rest)

        monkeypatch.setattr(runner._chooser, "choose", note)
        llm.embed(PROMPTS)
        assert shapes
        assert {rows for rows, _ in shapes} == {0}


def test_fewer_dimensions_are_normalized_anew_where_the_config_says_that_they_can_be(
    folders: dict[str, Path], tmp_path: Path
):
    folder = save_embedding_folder(tmp_path / "m", is_matryoshka=True)
    plain = PlainEmbedder(folder)
    with open_llm(folder) as llm:
        for dimensions in (1, 5, 32):
            (vector,) = llm.embed([SHARED], dimensions=dimensions)
            np.testing.assert_allclose(vector, plain(SHARED, dimensions), atol=2e-6)
        for dimensions in (0, 33, -1, True, 1.0, "5"):
            with pytest.raises(InvalidRequestError, match=r"^dimensions: "):
                llm.embed([SHARED], dimensions=dimensions)  # type: ignore[arg-type]
    with open_llm(folders["lasttoken"]) as llm:
        assert llm.embed([SHARED], dimensions=32)[0].shape == (32,)
        with pytest.raises(InvalidRequestError, match="config doesn't say"):
            llm.embed([SHARED], dimensions=16)


def test_without_a_module_for_it_nothing_is_normalized(tmp_path: Path):
    folder = save_embedding_folder(
        tmp_path / "m", "mean_tokens", modules=["Transformer", "Pooling"]
    )
    plain = PlainEmbedder(folder, "mean_tokens", normalize=False)
    with open_llm(folder) as llm:
        (vector,) = llm.embed([SHARED])
        assert np.linalg.norm(vector) > 1.5
        np.testing.assert_allclose(vector, plain(SHARED), atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3"])
def test_models_that_run_in_sequence_rows_embed_too(name: str, tmp_path: Path):
    folder = save_embedding_folder(tmp_path / "m", "mean_tokens", name=name)
    with open_llm(folder, prefill_chunk_size=7) as llm, open_llm(folder) as other:
        together = llm.embed(PROMPTS)
        alone = [other.embed([prompt])[0] for prompt in PROMPTS]
        np.testing.assert_allclose(together, alone, atol=1e-5)


def test_what_is_too_long_or_empty_is_refused_with_the_counts(
    folders: dict[str, Path], tmp_path: Path
):
    with open_llm(folders["lasttoken"], max_model_len=64) as llm:
        assert llm.embed([[7] * 64])[0].shape == (32,)
        with pytest.raises(ContextLengthError, match="65 tokens; the model takes at most 64"):
            llm.embed([[7] * 65])
        with pytest.raises(InvalidRequestError, match="empty"):
            llm.embed([[7], ""])
        with pytest.raises(InvalidRequestError, match="empty"):
            llm.embed([[7], []])
        with pytest.raises(InvalidRequestError, match="below"):
            llm.embed([[10**6]])
    with open_llm(folders["lasttoken"], num_blocks=2) as llm:
        assert llm.embed([[7] * 32])[0].shape == (32,)
        with pytest.raises(PoolTooSmallError, match="33 tokens"):
            llm.embed([[7] * 33])
    folder = save_embedding_folder(tmp_path / "m")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    with open_llm(folder) as llm:
        assert len(llm.generate([[7] * 40], GREEDY)) == 1
        with pytest.raises(ContextLengthError, match="at most 20"):
            llm.embed([[7] * 21])


def test_states_that_are_not_finite_fail_one_request_alone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    collect = ModelRunner.collect
    broken: set[int] = set()
    dispatch = ModelRunner.dispatch

    def note(self: ModelRunner, step: Step) -> None:
        broken.update(
            entry.sequence.seq_id
            for entry in step.scheduled
            if list(entry.sequence.request.prompt_token_ids) == [11]
        )
        dispatch(self, step)

    def spoil(self: ModelRunner) -> Any:
        result = collect(self)
        pooled = {
            seq_id: vector * np.float32("nan") if seq_id in broken else vector
            for seq_id, vector in result.pooled.items()
        }
        return replace(result, pooled=pooled)

    monkeypatch.setattr(ModelRunner, "dispatch", note)
    monkeypatch.setattr(ModelRunner, "collect", spoil)
    with open_llm(folders["lasttoken"]) as llm:
        jobs = [Job(prompt_token_ids=each, embedding=ALL) for each in PROMPTS[3:6]]
        outputs = list(llm.generate_iter(jobs))
        failed = [output for output in outputs if output.error is not None]
        assert len(failed) == 1
        assert isinstance(failed[0].error, RequestFailedError)
        assert failed[0].embedding is None
        assert sum(output.embedding is not None for output in outputs) == 2


def test_a_model_without_that_layout_says_so(tmp_path: Path):
    with open_llm(save_tiny_folder(tmp_path / "m")) as llm:
        with pytest.raises(InvalidRequestError, match=r"no embeddings: its folder has no modules"):
            llm.embed("hello")
        assert llm.generate("hello", GREEDY)
