"""A whole engine over the executed kernels: its tokens, its memory, and what it keeps."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.config import EngineConfig
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.sequence import Sequence
from pagedmlx.engine import build, memory
from pagedmlx.engine.outputs import Job
from pagedmlx.models import adapter, compiled, layer_spans
from pagedmlx.models.compiled import CompiledSteps, Plans
from pagedmlx.ops.base import PagedBatch
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Launch
from pagedmlx.ops.paths import AttentionPath
from pagedmlx.progress import ignore_progress
from tests.metal.launcher import FiberLauncher
from tests.support import tiny_models
from tests.support.engines import assert_idle, run_jobs
from tests.support.greedy import expected_tokens
from tests.support.tiny_models import CONFIGS, tiny_model
from tests.support.tokenizers import byte_tokenizer

NUM_TOKENS = 12
SHARED = 37
OWN = (1, 5, 12)
OTHERS = (1, 9, 70)
LITTLE_BYTES = 24 << 10
"""A step's metadata and logits."""
LITTLE_SHARE = 0.6
"""The same as a share of the pool: one that has grown by doubling leaves nearly as much as it has,
should nobody have freed what it had."""


class Tracing(FiberLauncher):
    """Executes kernels; in a trace, where nothing can run, it gives zeros made of the inputs."""

    num_traced = 0

    def __call__(self, launch: Launch) -> list[mx.array]:
        try:
            mx.eval(launch.inputs)
        except ValueError:
            self.num_traced += 1
            nothing = sum((0 * each.reshape(-1)[0] for each in launch.inputs), mx.array(0))
            shapes = zip(launch.output_shapes, launch.output_dtypes, strict=True)
            return [mx.broadcast_to(nothing, shape).astype(dtype) for shape, dtype in shapes]
        return super().__call__(launch)


class Serving:
    """An engine over the kernels, and what it is asked; for the thread that makes it.

    Args:
        launcher: Executes the kernels.
        prefill: Who attends chunks.
        pool_fill: What is in the pool at first.
    """

    def __init__(
        self, launcher: FiberLauncher, prefill: str, pool_fill: float = float("nan")
    ) -> None:
        self._before = mx.get_active_memory()
        backend = KernelBackend(launcher, 8, prefill=prefill, cascade="on")
        path = AttentionPath(backend, InPlaceWriter(launcher))
        config = EngineConfig(
            block_size=8,
            num_blocks=32,
            prefill_chunk_size=20,
            max_num_batched_tokens=40,
            pool_fill=pool_fill,
            check_integrity=True,
        )
        loaded = tiny_model("tiny")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "attention_paths", lambda *_: (path,))
            patch.setattr(build, "tune", lambda *_: [])
            patch.setattr(memory, "MIN_SLAB_BYTES", 0)
            self.engine = build.build_engine(
                loaded, byte_tokenizer(), config, on_progress=ignore_progress
            )
        self._weights = loaded.parameter_bytes
        rng = np.random.default_rng(3)
        shared: list[int] = rng.integers(3, 250, SHARED).tolist()
        self.prompts = [
            *([*shared, *rng.integers(3, 250, count).tolist()] for count in OWN),
            *(rng.integers(3, 250, count).tolist() for count in OTHERS),
        ]
        self.expected = [
            expected_tokens(loaded.model, prompt, NUM_TOKENS) for prompt in self.prompts
        ]

    def jobs(self, n: int, max_tokens: int = NUM_TOKENS) -> list[Job]:
        params = SamplingParams(n=n, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return [Job(prompt_token_ids=each, sampling_params=params) for each in self.prompts]

    def serve(self, n: int = 1) -> None:
        """Everything at once, each prompt with so many outputs: the tokens are mlx-lm's."""
        outputs = run_jobs(self.engine, self.jobs(n))
        found = [list(each.token_ids) for output in outputs for each in output.outputs]
        assert found == [tokens for tokens in self.expected for _ in range(n)]

    def abort(self) -> None:
        """Start everything, and end it while prompts and outputs are under way."""
        ids = [self.engine.add_request(job) for job in self.jobs(3)]
        for _ in range(5):
            self.engine.step()
        for request_id in ids:
            self.engine.abort(request_id)

    def shrink(self) -> None:
        """Twice what happens when nobody has asked for anything for a while."""
        for _ in range(2):
            self.engine._last_release_s = -1e9
            self.engine.release_unused()

    def check_memory(self) -> int:
        """Beside weights and pool there is little. Returns the pool's bytes."""
        mx.synchronize()
        pool_bytes = self.engine.stats().allocated_bytes
        little = mx.get_active_memory() - self._before - self._weights - pool_bytes
        assert little < LITTLE_SHARE * pool_bytes
        return pool_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End it; nothing of it is left on the device."""
        if kind is None:
            assert_idle(self.engine)
        self.engine.close()
        if kind is None:
            assert mx.get_active_memory() - self._before < LITTLE_BYTES


def num_sequences() -> int:
    """Sequences that anybody still knows."""
    gc.collect()
    return sum(isinstance(each, Sequence) for each in gc.get_objects())


def on_a_thread(work: Callable[[], object]) -> None:
    """Run where an engine can be closed: afterwards the thread is done with MLX."""
    errors: list[BaseException] = []

    def run() -> None:
        gc.collect()
        gc.disable()
        try:
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            gc.enable()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.fixture(autouse=True)
def exact_sizes() -> Iterator[None]:
    """MLX keeps nothing that was freed: what an array gets of that may be larger than it needs."""
    limit = mx.set_cache_limit(0)
    mx.clear_cache()
    yield
    mx.set_cache_limit(limit)


@pytest.fixture
def tiny(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of this type with two layers that all kernels can serve."""
    config: dict[str, Any] = {
        **CONFIGS[request.param],
        "hidden_size": 64,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
    }
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2]
    configs: Mapping[str, Mapping[str, Any]] = {"tiny": config}
    monkeypatch.setattr(tiny_models, "CONFIGS", configs)
    return request.param


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compiled steps run their Python again instead, over the pool that they were traced with.

    For each step the number of steps that its graph had served before.
    """
    function_of = CompiledSteps._function
    replayed: list[int] = []

    def keep_pools(
        self: CompiledSteps, like: PagedBatch, plans: Plans, span: range
    ) -> Callable[..., Any]:
        step, store, times = function_of(self, like, plans, span), self._store, itertools.count()
        pools = dict(store._pools)

        def replay(*arrays: mx.array) -> Any:
            if span.start == 0:
                replayed.append(next(times))
            now, store._pools = store._pools, pools
            try:
                return step(*arrays)
            finally:
                store._pools = now

        return replay

    monkeypatch.setattr(CompiledSteps, "_function", keep_pools)
    monkeypatch.setattr(compiled, "MIN_USES", 1)
    monkeypatch.setattr(layer_spans, "FIRST_SPAN", 1)  # of two layers
    monkeypatch.setattr(mx, "compile", lambda function: function)
    return replayed


@pytest.mark.parametrize(
    ("tiny", "prefill", "written_by"),
    [
        ("llama", "split", "rope"),
        ("llama", "gather", "rope"),
        ("llama_window", "kernel", "rope"),
        ("gpt_oss", "auto", "rope"),
        # Its layers do something else with rotated queries, or rotate nothing.
        ("cohere2", "auto", "write"),
    ],
    indirect=["tiny"],
)
def test_tokens_are_mlx_lms_and_memory_is_weights_and_pool(
    tiny: str,
    prefill: str,
    written_by: str,
    replayed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter, "MIN_PADDED_ROWS", 4)
    monkeypatch.setattr(adapter, "ROW_MULTIPLE", 8)

    def work() -> None:
        launcher = FiberLauncher()
        others = num_sequences()
        with Serving(launcher, prefill) as serving:
            smallest = serving.engine.stats().allocated_bytes
            for n in (1, 3, 1):
                serving.serve(n)
                assert serving.check_memory() > 8 * smallest
                serving.shrink()
                assert serving.check_memory() == smallest
            serving.abort()
            serving.serve()
            serving.check_memory()
            assert num_sequences() - others <= len(serving.prompts), "more than one step's"
            assert serving.engine.stats().num_preemptions > 0
        kinds = {name.split("_")[1] for name in launcher.executed}
        assert {written_by, "copy", "decode", "prefill", "merge", "most"} <= kinds
        assert ("rope" in kinds) == (written_by == "rope")
        assert max(replayed) > 1

    on_a_thread(work)


@pytest.mark.parametrize("tiny", ["llama"], indirect=True)
def test_one_graph_serves_prompts_of_several_lengths_behind_a_cached_beginning(
    tiny: str, replayed: list[int]
) -> None:
    def work() -> None:
        model, rng = tiny_model("tiny").model, np.random.default_rng(5)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        with Serving(FiberLauncher(), "split") as serving:
            for length in (16, 12, 9, 11, 10):
                prompt = [*serving.prompts[0][:32], *rng.integers(3, 250, length).tolist()]
                if length == 12:
                    replayed.clear()  # the beginning is cached now
                job = Job(prompt_token_ids=prompt, sampling_params=params)
                (output,) = run_jobs(serving.engine, [job])
                assert list(output.outputs[0].token_ids) == expected_tokens(model, prompt, 1)
        assert replayed == [0, 1, 2, 3]

    on_a_thread(work)


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("tiny", ["llama"], indirect=True)
def test_a_wrong_choice_of_tokens_is_left_to_mlx_and_that_is_said(tiny: str) -> None:
    def work() -> None:
        launcher = FiberLauncher(change=lambda _, source: source.replace("logit > top", "false"))
        with Serving(launcher, "auto") as serving:
            said = [note for note in serving.engine.notes if note.startswith("most likely tokens")]
            launcher.executed.clear()
            serving.serve()
        assert "by MLX, slower instead: it finds other tokens" in said[0]
        assert "most" not in {name.split("_")[1] for name in launcher.executed}

    on_a_thread(work)


@pytest.mark.parametrize("tiny", ["llama"], indirect=True)
def test_steps_that_mlx_has_compiled_keep_no_pool_that_has_grown(tiny: str) -> None:
    def work() -> None:
        launcher = Tracing()
        with Serving(launcher, "auto", pool_fill=0.0) as serving:
            for max_tokens in (20, 30):
                num_traced = launcher.num_traced
                # What a traced kernel gives is no answer, but the graph holds all that one does.
                run_jobs(serving.engine, serving.jobs(1, max_tokens)[3:5])
                assert launcher.num_traced > num_traced
                serving.check_memory()
                serving.shrink()
                serving.check_memory()

    on_a_thread(work)
