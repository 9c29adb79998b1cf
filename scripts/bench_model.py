"""A whole model through the engine on this GPU, beside mlx-lm's own generation in the same run.

    python scripts/bench_model.py --json FILE [--model 8b|8b-4bit|MODEL] [--only logits,...]

Sections: ``logits`` compares the kernels with the reference backend, on mixed batches, ``cascade``
on sequences that share a beginning; ``stream`` is one stream at several contexts, milliseconds per
token; ``batch`` is 16 and 64 running sequences, beside what reading their bytes takes at least.
Ours and mlx-lm's take turns, a few tokens each, because hosts change their speed within seconds.
Where torch is installed, its profiler says how long the device was busy in a step.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.models.blas import load_fast_blas

load_fast_blas()  # counts only before MLX is imported

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step

from pagedmlx.core.batch import BatchArrays, batch_of
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.engine.outputs import Job
from pagedmlx.kv.store import KVStore
from pagedmlx.models.adapter import ModelAdapter
from pagedmlx.models.loader import LoadedModel
from pagedmlx.models.weights import named_parameters
from pagedmlx.ops import AttentionPath, attention_paths
from pagedmlx.ops.base import PagedBatch
from pagedmlx.ops.cascade import CascadePath
from pagedmlx.ops.kernels import KernelBackend
from scripts.kernel_layers import measure_ceiling
from scripts.report import add_json_option, note, numbers, save, save_so_far
from scripts.shapes import load, make_engine
from scripts.trace import trace

CHECKS = ("logits", "cascade")
CONTEXTS = (512, 4096, 16384, 32768)
NUM_SHARED = 512
NUM_SHARING = 7
NUM_WARM = 12
NUM_TURNS = 10
TURN = 16
"""Steps of a turn; the first few fill the pipeline and don't count."""
NUM_FILLING = 3
NUM_TRACED = 8
NUM_TOKENS = NUM_WARM + NUM_TURNS * TURN + NUM_TRACED + 8
TOLERANCES = {"bfloat16": 3e-2, "float16": 1e-2, "float32": 1e-4}
"""Largest difference between logits, as a share of the largest logit."""


# Logits: the kernels against the reference backend.


def mixed_batches(vocab_size: int) -> Iterator[tuple[list[tuple[int, int]], np.ndarray]]:
    """Steps over seven sequences: prompts in chunks of unlike lengths, then decode rows beside."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, vocab_size, (7, 700))
    yield [(0, 300), (0, 17), (0, 16), (0, 1), (0, 129), (0, 5), (0, 64)], tokens
    yield [(300, 1), (17, 1), (16, 1), (1, 1), (129, 300), (5, 3), (64, 65)], tokens
    yield [(301, 1), (18, 1), (17, 1), (2, 1), (429, 1), (8, 8), (129, 1)], tokens


def shared_batches(vocab_size: int) -> Iterator[tuple[list[tuple[int, int]], np.ndarray]]:
    """The first sequence computes what all begin with; then all go on, and decode."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, vocab_size, (NUM_SHARING, 700))
    tokens[:, :NUM_SHARED] = tokens[0, :NUM_SHARED]
    yield [(0, NUM_SHARED)], tokens
    own = [5 + 3 * number for number in range(NUM_SHARING)]
    yield [(NUM_SHARED, count) for count in own], tokens
    for step in range(2):
        yield [(NUM_SHARED + count + step, 1) for count in own], tokens


def run_path(
    loaded: LoadedModel,
    path: AttentionPath,
    batches: Callable[[int], Iterator[tuple[list[tuple[int, int]], np.ndarray]]] = mixed_batches,
    num_shared: int = 0,
) -> list[np.ndarray]:
    """Logits of every sequence's last row in each of the batches.

    Args:
        loaded: The model.
        path: How it attends.
        batches: What it computes.
        num_shared: Tokens whose blocks all sequences share.
    """
    results = []
    shape = (NUM_SHARING, 44)
    with ModelAdapter(loaded, path.backend, block_size=16) as adapter:
        groups = adapter.layout.groups
        count = shape[0] * shape[1]
        store = KVStore(adapter.layout, (count,) * len(groups), float("nan"), path.writer)
        tables = np.random.default_rng(2).permutation(count).reshape(shape).astype(np.int32)
        tables[:, : num_shared // 16] = tables[0, : num_shared // 16]
        for spans, tokens in batches(adapter.vocab_size):
            batch = lay_out(spans, tokens, tables, len(groups))
            logits = adapter.forward(PagedBatch(batch), store)
            store.submit(logits)
            results.append(np.array(logits.astype(mx.float32)))
    return results


def lay_out(
    spans: Sequence[tuple[int, int]], tokens: np.ndarray, tables: np.ndarray, num_groups: int
) -> BatchArrays:
    """One step by hand, single rows first."""
    order = sorted(range(len(spans)), key=lambda s: spans[s][1] > 1)
    computed = [tokens[s][spans[s][0] : sum(spans[s])] for s in order]
    return batch_of(
        [spans[s] for s in order],
        [tables[order]] * num_groups,
        16,
        token_ids=np.concatenate(computed).astype(np.int32),
    )


def compare_logits(loaded: LoadedModel) -> dict[str, Any]:
    """Largest difference of each step's logits, as a share of the largest logit."""
    expected = run_path(loaded, attention_paths("reference")[0])
    found = run_path(loaded, attention_paths("auto")[0])
    errors = differences(found, expected)
    # What a model makes of rounding depends on its weights; MLX's own attention is the yardstick.
    yardstick = differences(run_path(loaded, attention_paths("gather")[0]), expected)
    tolerance = max(TOLERANCES[loaded.dtype], 1.25 * max(yardstick))
    agree = [
        float(np.mean(a.argmax(-1) == b.argmax(-1))) for a, b in zip(found, expected, strict=True)
    ]
    return {
        "path": attention_paths("auto")[0].backend.name,
        "errors": errors,
        "errors_of_gather": yardstick,
        "tolerance": tolerance,
        "same_most_likely_token": agree,
        "passed": all(error <= tolerance for error in errors),
    }


def compare_cascade(loaded: LoadedModel) -> dict[str, Any]:
    """The same for sequences that share blocks, which are attended once for all of them."""

    def run(path: AttentionPath) -> list[np.ndarray]:
        return run_path(loaded, path, shared_batches, NUM_SHARED)

    path = attention_paths("auto")[0]
    if not isinstance(path.backend, KernelBackend):
        return {"left_out": f"attention is by {path.backend.name}", "passed": True}
    expected = run(attention_paths("reference")[0])
    yardstick = differences(run(path), expected)
    path.backend.cascades.path = CascadePath.ON
    errors = differences(run(path), expected)
    tolerance = max(TOLERANCES[loaded.dtype], 1.25 * max(yardstick))
    return {
        "errors": errors,
        "errors_without": yardstick,
        "tolerance": tolerance,
        "passed": all(error <= tolerance for error in errors),
    }


def differences(found: list[np.ndarray], expected: list[np.ndarray]) -> list[float]:
    """Largest difference of each step, as a share of the largest expected logit."""
    return [
        float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
        for a, b in zip(found, expected, strict=True)
    ]


# Speed.


class Contestant:
    """Something that makes a token, or one for each sequence, at every step, and its times.

    Args:
        step: Makes them; the device may still be busy with it afterwards.
        waited: Seconds spent waiting for the device so far.
    """

    def __init__(self, step: Callable[[], object], waited: Callable[[], float]) -> None:
        self._step = step
        self._waited = waited
        self._steps: list[float] = []
        self._waits: list[float] = []

    def turn(self) -> None:
        """A few steps on the clock."""
        mx.synchronize()
        for number in range(TURN):
            waited, start = self._waited(), time.perf_counter()
            self._step()
            if number >= NUM_FILLING:
                self._steps.append(time.perf_counter() - start)
                self._waits.append(self._waited() - waited)
        mx.synchronize()

    def trace(self) -> dict[str, Any]:
        """What the device did in a few steps; empty without torch."""
        busy = trace(lambda: [self._step() for _ in range(NUM_TRACED)], "most_likely")
        if busy is None:
            return {}
        return {
            "device_busy_ms": busy.seconds * 1e3 / NUM_TRACED,
            "device_idle_share_while_traced": busy.idle_share,
            "device_idle_share_between_steps": busy.between_share,
            "launches": busy.launches / NUM_TRACED,
        }

    def summary(self) -> dict[str, Any]:
        """Milliseconds of a step, and how much of the median the host was busy with it."""
        steps, waits = np.array(self._steps) * 1e3, np.array(self._waits) * 1e3
        return {
            "num_steps": len(steps),
            "step_ms": float(np.median(steps)),
            "mean_ms": float(steps.mean()),
            "best_tenth_ms": float(np.percentile(steps, 10)),
            # Whoever doesn't say how long it waited isn't asked.
            **({"host_ms": float(np.median(steps - waits))} if waits.any() else {}),
            **self.trace(),
        }


class Ours(Contestant):
    """The engine with all prompts at once, greedy."""

    def __init__(self, loaded: LoadedModel, prompts: list[list[int]]) -> None:
        total = sum(len(prompt) + NUM_TOKENS for prompt in prompts)
        self.engine = make_engine(
            loaded,
            num_blocks=total // 16 + len(prompts) + 64,
            prefill_chunk_size=2048,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
        )
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        for prompt in prompts:
            self.engine.add_request(Job(prompt_token_ids=prompt, sampling_params=params))
        while self.engine.stats().num_output_tokens < len(prompts) * NUM_WARM:
            self.engine.step()
        stats = self.engine.stats()
        self.token_bytes = stats.block_bytes // stats.block_size
        runner: Any = self.engine._runner
        self._adapter = runner._adapter
        self._collect: Callable[[], Any] = runner.collect
        runner.collect = self._timed_collect
        super().__init__(self.engine.step, lambda: self._in_collect)
        self._in_collect = 0.0

    def _timed_collect(self) -> Any:
        start = time.perf_counter()
        try:
            return self._collect()
        finally:
            self._in_collect += time.perf_counter() - start

    def close(self) -> None:
        """Give the model back as it was."""
        self._adapter.close()


class Theirs(Contestant):
    """mlx-lm's own generation of one stream, greedy."""

    def __init__(self, model: nn.Module, prompt: list[int]) -> None:
        tokens = generate_step(mx.array(prompt), model, max_tokens=NUM_TOKENS)
        for _ in range(NUM_WARM):
            next(tokens)
        super().__init__(lambda: next(tokens), lambda: 0.0)


def stream(loaded: LoadedModel, contexts: Sequence[int]) -> dict[str, Any]:
    """One stream at each context, ours and mlx-lm's."""
    vocab_size = int(loaded.config["vocab_size"])
    rows: dict[str, Any] = {}
    for context in contexts:
        prompt = np.random.default_rng(context).integers(0, vocab_size, context).tolist()
        # mlx-lm's first: its prompt must not meet the hook.
        theirs = Theirs(loaded.model, prompt)
        ours = Ours(loaded, [prompt])
        for _ in range(NUM_TURNS):
            theirs.turn()
            ours.turn()
        row: dict[str, Any] = {"pagedmlx": ours.summary(), "mlx_lm": theirs.summary()}
        for name in ("step_ms", "mean_ms", "best_tenth_ms"):
            row[f"ratio_of_{name}"] = row["pagedmlx"][name] / row["mlx_lm"][name]
        rows[str(context)] = row
        note(f"context {context}: {row}")
        ours.close()
        del ours, theirs
        mx.clear_cache()
    return rows


def batch(loaded: LoadedModel, contexts: Sequence[int]) -> dict[str, Any]:
    """Many sequences at once, beside the time in which their bytes could be read at best."""
    bandwidth = measure_ceiling()["gb_per_s"]
    vocab_size = int(loaded.config["vocab_size"])
    generator = np.random.default_rng(3)
    rows: dict[str, Any] = {"gb_per_s": bandwidth}
    for count, context in itertools.product((16, 64), contexts):
        prompts = [generator.integers(0, vocab_size, context).tolist() for _ in range(count)]
        ours = Ours(loaded, prompts)
        for _ in range(NUM_TURNS // 2):
            ours.turn()
        row = ours.summary()
        # Half of the tokens that the turns make are there on the average.
        live = count * (context + NUM_WARM + NUM_TURNS * TURN // 4)
        read_bytes = weights_read(loaded) + live * ours.token_bytes
        row["roofline_ms"] = read_bytes / bandwidth / 1e6
        row["times_roofline"] = row["step_ms"] / row["roofline_ms"]
        rows[f"{count} x {context}"] = row
        note(f"{count} x {context}: {row}")
        ours.close()
        del ours
        mx.clear_cache()
    return rows


def weights_read(loaded: LoadedModel) -> int:
    """Bytes of weights that a step reads: all, but of a table of embeddings only a few rows."""
    tables = sum(
        array.nbytes
        for name, array in named_parameters(loaded.model)
        if "embed_tokens" in name and not loaded.config.get("tie_word_embeddings")
    )
    return loaded.parameter_bytes - tables


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="8b", help="8b, 8b-4bit, mini, or as pagedmlx takes it")
    add_json_option(parser)
    parser.add_argument("--only", default="logits,cascade,stream,batch", help="sections")
    parser.add_argument(
        "--contexts",
        type=numbers,
        default=CONTEXTS,
        metavar="N,N",
        help="tokens of the prompts of stream",
    )
    parser.add_argument(
        "--batch-contexts", type=numbers, default=(512, 2048), metavar="N,N", help="of batch"
    )
    options = parser.parse_args()
    loaded = load(options.model)
    sections: dict[str, Callable[[LoadedModel], dict[str, Any]]] = {
        "logits": compare_logits,
        "cascade": compare_cascade,
        "stream": lambda loaded: stream(loaded, options.contexts),
        "batch": lambda loaded: batch(loaded, options.batch_contexts),
    }
    report: dict[str, Any] = {"model": options.model, "dtype": loaded.dtype}
    for name in options.only.split(","):
        report[name] = sections[name](loaded)
        note(f"{name}: done")
        save_so_far(report, options.json)
    save(report, options.json)
    return 0 if all(report.get(name, {"passed": True})["passed"] for name in CHECKS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
