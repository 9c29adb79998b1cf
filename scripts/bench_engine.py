"""What the engine makes of prompts: how long streams wait for them, and what sharing them saves.

    python scripts/bench_engine.py --json FILE [--model 8b] [--only gap,warm,candidates,cascade]

``gap`` has a stream run while a long prompt is computed, under several bounds; ``warm`` is the
time to the first token of a prompt whose beginning is in the prefix cache, against one that isn't;
``candidates`` counts the blocks of eight answers to one prompt; ``cascade`` decodes sequences with
a long common beginning, the shared tokens attended once for all or once for each, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.models.blas import load_fast_blas

load_fast_blas()  # counts only before MLX is imported

import mlx.core as mx
import numpy as np

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.engine.engine import Engine
from pagedmlx.engine.outputs import Job
from pagedmlx.models.loader import LoadedModel
from pagedmlx.ops.cascade import CascadePath
from pagedmlx.ops.kernels import KernelBackend
from scripts.report import add_json_option, note, numbers, save, save_so_far
from scripts.shapes import load, make_engine

NUM_ROUNDS = 9
NUM_WARM_ROUNDS = 15
"""Of ``warm``: steps of a shape are compiled when it has come a few times."""
TURN = 16
"""Steps of a turn of ``cascade``; the first few fill the pipeline and don't count."""
NUM_FILLING = 4
NUM_FIRST, NUM_ALONE = 16, 48
"""Tokens of the stream of ``gap`` by itself; while the first ones come, its steps are compiled."""
NUM_SLOWEST = 3


class Measurements:
    """One model, and the sections.

    Args:
        loaded: The model.
        scale: Of all lengths; below 1 for tests.
        bounds_ms: Of the gaps between a stream's tokens.
    """

    def __init__(self, loaded: LoadedModel, scale: float, bounds_ms: list[int]) -> None:
        self._loaded = loaded
        self._scale = scale
        self._bounds_ms = bounds_ms
        self._generator = np.random.default_rng(0)
        self._vocab_size = int(loaded.config["vocab_size"])

    def gap(self) -> dict[str, Any]:
        """Longest time between tokens of a stream, alone and beside a long prompt, twice."""
        rows: dict[str, Any] = {}
        for bound_ms in self._bounds_ms:
            with self._engine(num_tokens=20_000, max_stream_gap_ms=bound_ms) as engine:
                rows[str(bound_ms)] = row = self._gaps(engine)
            for each in ("first", "again"):
                row[each]["times_bound"] = row[each]["longest_ms"] / bound_ms
            note(f"gap, at most {bound_ms} ms: {row}")
        return rows

    def _gaps(self, engine: Engine) -> dict[str, Any]:
        # What is made at the first use of any large step isn't what is measured.
        self._first_token(engine, "warm-up", self._prompt(1000))
        stream = Stream(engine)
        add(engine, Stream.name, self._prompt(64), max_tokens=4000)
        stream.run(lambda: len(stream.moments) >= NUM_FIRST)
        stream.summary()
        stream.run(lambda: len(stream.moments) >= NUM_ALONE)
        row: dict[str, Any] = {"alone": stream.summary()}
        for each in ("first", "again"):
            prompt = self._prompt(16_384)
            start = time.perf_counter()
            add(engine, each, prompt, max_tokens=2)
            stream.run(lambda name=each: name in stream.came)
            row[each] = {
                "prompt_tokens": len(prompt),
                "prompt_ttft_s": stream.came[each] - start,
                **stream.summary(),
            }
        return row

    def warm(self) -> dict[str, Any]:
        """Time to the first token of 4,096 tokens, none or 4,000 of them in the prefix cache."""
        seconds: dict[str, list[float]] = {"cold": [], "warm": []}
        cached, num_tokens = 0, 64_000
        with self._engine(num_tokens=num_tokens) as engine:
            # As where a server has run for a while: the pool grows no more.
            self._first_token(engine, "growing", self._prompt(num_tokens))
            for number in range(NUM_WARM_ROUNDS + 1):
                prompt = self._prompt(4096)
                again = prompt[: self._scaled(4000)] + self._prompt(96)
                for name, text in (("cold", prompt), ("warm", again)):
                    before = engine.stats().num_cached_tokens
                    took = self._first_token(engine, f"{name}-{number}", text)
                    cached = engine.stats().num_cached_tokens - before
                    if number:  # the first round compiles
                        seconds[name].append(took)
        cold, warm = (median(each) for each in seconds.values())
        return {
            "cold_s": seconds["cold"],
            "warm_s": seconds["warm"],
            "cached_tokens": cached,
            "warm_share": warm / cold,
        }

    def _first_token(self, engine: Engine, name: str, prompt: list[int]) -> float:
        start = time.perf_counter()
        add(engine, name, prompt, max_tokens=1)
        took = None
        while engine.has_unfinished:
            if any(event.token_ids for event in engine.step()) and took is None:
                took = time.perf_counter() - start
        assert took is not None
        return took

    def candidates(self) -> dict[str, Any]:
        """Blocks that eight answers to one prompt take; one that ends within a block, or with it.

        Each answer computes the prompt's last token itself, in a block of its own: its tail.
        """
        return {str(length): self._candidates(self._prompt(length)) for length in (4090, 4096)}

    def _candidates(self, prompt: list[int]) -> dict[str, Any]:
        num_outputs = self._scaled(128)
        with self._engine(num_tokens=64_000) as engine:
            size = engine.stats().block_size
            add(engine, "candidates", prompt, max_tokens=num_outputs, n=8)
            while engine.has_unfinished:
                engine.step()
            found = engine.stats().peak_used_blocks
        num_whole = (len(prompt) - 1) // size
        end = len(prompt) + num_outputs - 1
        most = num_whole + 8 * (-(-end // size) - num_whole)
        return {
            "prompt_tokens": len(prompt),
            "peak_used_blocks": found,
            "one_prompt_and_8_tails": most,
            "eight_sequences": 8 * -(-end // size),
            "ok": found <= most,
        }

    def cascade(self) -> dict[str, Any]:
        """Decode steps of sequences that share their beginning, with and without a cascade."""
        rows: dict[str, Any] = {}
        for count, shared, own in ((16, 8192, 128), (16, 2048, 128), (64, 2048, 128), (8, 512, 64)):
            num_outputs = (2 * NUM_ROUNDS + 3) * TURN
            tokens = shared + count * (own + num_outputs + 32)
            with self._engine(num_tokens=tokens, max_num_seqs=count) as engine:
                runner: Any = engine._runner
                backend = runner._adapter.backend
                if not isinstance(backend, KernelBackend):
                    return {"left_out": f"attention is by {backend.name}"}
                beginning = self._prompt(shared)
                add(engine, "first", beginning, max_tokens=1)
                while engine.has_unfinished:
                    engine.step()
                for number in range(count):
                    text = beginning + self._prompt(own)
                    add(engine, str(number), text, max_tokens=num_outputs)
                while engine.stats().num_running < count or any(
                    each.num_output_tokens == 0 for each in engine._scheduler.running
                ):
                    engine.step()
                rows[f"{count} x ({shared} shared + {own})"] = row = alternate(engine, backend)
                note(f"cascade, {count} x ({shared} shared + {own}): {row}")
        return rows

    @contextmanager
    def _engine(self, num_tokens: int, **settings: Any) -> Iterator[Engine]:
        engine = make_engine(self._loaded, num_blocks=num_tokens // 16 + 64, **settings)
        runner: Any = engine._runner
        try:
            yield engine
        finally:
            runner._adapter.close()
            del engine, runner
            mx.clear_cache()

    def _prompt(self, length: int) -> list[int]:
        return self._generator.integers(0, self._vocab_size, self._scaled(length)).tolist()

    def _scaled(self, length: int) -> int:
        return max(2, int(length * self._scale))


class Stream:
    """The times of a running request's tokens, and of what comes beside it.

    Attributes:
        moments: When its tokens came, the last one of the summary before among them.
        came: When each request's first token came.
    """

    name = "stream"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_prompt_tokens: list[int | None] = []
        self.moments: list[float] = []
        self.came: dict[str, float] = {}

    def run(self, until: Callable[[], bool]) -> None:
        """Take steps."""
        while self._engine.has_unfinished and not until():
            oldest = next(iter(self._engine._under_way), None)
            for event in self._engine.step():
                now = time.perf_counter()
                self.came.setdefault(event.request_id, now)
                if event.request_id == self.name:
                    self.moments.extend([now] * len(event.token_ids))
                    self._num_prompt_tokens.append(oldest.num_prompt_tokens if oldest else None)

    def summary(self) -> dict[str, Any]:
        """Of the tokens since the summary before.

        With the slowest is said how many tokens of prompts their step had, where steps overlap.
        """
        gaps = [1e3 * (b - a) for a, b in itertools.pairwise(self.moments)]
        steps = zip(gaps, self._num_prompt_tokens[-len(gaps) :], strict=True)
        self.moments = self.moments[-1:]
        return {
            "longest_ms": max(gaps),
            "median_ms": median(gaps),
            "num_steps": len(gaps),
            "slowest_ms_and_prompt_tokens": sorted(steps, key=lambda step: -step[0])[:NUM_SLOWEST],
        }


def alternate(engine: Engine, backend: KernelBackend) -> dict[str, Any]:
    """Turns of decode steps in both ways; milliseconds of a step."""
    cascades = backend.cascades
    steps: dict[CascadePath, list[float]] = {CascadePath.OFF: [], CascadePath.ON: []}
    before = cascades.path
    for path in itertools.islice(itertools.cycle(steps), 2 * NUM_ROUNDS + 2):
        cascades.path = path
        mx.synchronize()
        times = []
        for number in range(TURN):
            start = time.perf_counter()
            engine.step()
            if number >= NUM_FILLING:
                times.append(time.perf_counter() - start)
        steps[path].append(1e3 * float(np.mean(times)))
    cascades.path = before
    cascades.forget()
    engine.step()
    # The first turn of each compiles.
    off, on = (each[1:] for each in steps.values())
    return {
        "on_by_itself": any(found.cascade is not None for found in cascades._last.values()),
        "off_ms": off,
        "on_ms": on,
        "times_faster": median(a / b for a, b in zip(off, on, strict=True)),
        "times_faster_at_best": min(off) / min(on),
    }


def add(engine: Engine, name: str, prompt: list[int], *, max_tokens: int, n: int = 1) -> None:
    """A greedy request."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n)
    engine.add_request(Job(prompt_token_ids=prompt, sampling_params=params, request_id=name))


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="8b", help="8b, 8b-4bit, mini, or as pagedmlx takes it")
    add_json_option(parser)
    parser.add_argument("--only", default="gap,warm,candidates,cascade", help="sections")
    parser.add_argument("--bounds", default="30,60,120,250", metavar="MS,MS", help="of gap")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths; for tests")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - {"gap", "warm", "candidates", "cascade"}:
        parser.error(f"--only: no section {', '.join(sorted(unknown))}")
    measurements = Measurements(load(options.model), options.scale, numbers(options.bounds))
    report: dict[str, Any] = {"model": options.model}
    for name in names:
        report[name] = getattr(measurements, name)()
        note(f"{name}: {report[name]}")
        save_so_far(report, options.json)
    save(report, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
