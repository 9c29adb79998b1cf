"""Runs requests through one real system in this process and measures its memory and speed.

    python -m scripts.compare.real JOB.json

The job names the system: ``pagedmlx``, ``mlx-lm`` (its BatchGenerator, contiguous caches padded to
the longest), or ``inspect``, which only says what the model is. Lines of JSON on stdout tell how
far it is; the last one is the result. ``scripts/compare_memory.py`` starts it, once per system, so
that neither system's memory is ever counted for the other. With ``rounds`` in the job there are as
many results, each after a line on stdin, so that systems can take turns; what is on that line, if
anything, are the requests from then on.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pagedmlx.models.blas import load_fast_blas

load_fast_blas()  # counts only before MLX is imported

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from pagedmlx import SamplingParams
from pagedmlx.engine.memory import device_memory_bytes
from pagedmlx.engine.outputs import Job as EngineJob
from scripts.compare.traces import Job
from scripts.shapes import load, make_engine

REPORT_EVERY_S = 0.25
SERIES_POINTS = 200
NUM_SLOWEST = 8
WARM_UP = tuple(Job(tuple(range(20, 20 + length)), 6) for length in (40, 20, 10))


@dataclass(frozen=True, slots=True)
class KVUse:
    """K and V at one moment, in bytes.

    Attributes:
        held: What running sequences keep from others.
        needed: What their tokens fill, counted once for each sequence.
        running: Sequences with any.
    """

    held: int
    needed: int
    running: int


class RealSystem(Protocol):
    """Something that runs a model.

    Attributes:
        pool_bytes: May be taken for K and V; 0 where there is no limit.
    """

    pool_bytes: int

    @property
    def taken_bytes(self) -> int:
        """Those of them that are taken now."""
        ...

    def add(self, job_id: int, job: Job) -> None:
        """A request arrives."""
        ...

    def step(self) -> list[tuple[tuple[int, int], int]] | None:
        """Tokens that came, each behind its job and candidate; None without work."""
        ...

    def use(self) -> KVUse:
        """K and V now."""
        ...

    def counts(self) -> dict[str, int]:
        """What the system itself counted."""
        ...


class Ours:
    """pagedmlx's engine.

    Args:
        model: Name or path.
        settings: Of the engine.
    """

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        self.engine = make_engine(model, **settings)
        stats = self.engine.stats()
        self.pool_bytes = stats.pool_bytes
        self.depth: int = self.engine._runner.depth
        self._block_bytes = stats.block_bytes
        self._token_bytes = stats.block_bytes // stats.block_size
        self._before = dict[str, int]()

    @property
    def taken_bytes(self) -> int:
        """The pool's arrays."""
        return self.engine.stats().allocated_bytes

    def add(self, job_id: int, job: Job) -> None:
        """A request arrives."""
        params = SamplingParams(
            n=job.n, temperature=0.0, max_tokens=job.num_outputs, ignore_eos=True
        )
        self.engine.add_request(
            EngineJob(
                prompt_token_ids=job.prompt, sampling_params=params, request_id=f"job-{job_id}"
            )
        )

    def step(self) -> list[tuple[tuple[int, int], int]] | None:
        """Tokens of the oldest step under way."""
        if not self.engine.has_unfinished:
            return None
        return [
            ((int(event.request_id.removeprefix("job-")), event.index), token)
            for event in self.engine.step()
            for token in event.token_ids
        ]

    def use(self) -> KVUse:
        """Blocks in tables, and what sequences have computed."""
        running = self.engine._scheduler.running
        held = self.engine.stats().num_used_blocks * self._block_bytes
        needed = sum(sequence.num_computed_tokens for sequence in running) * self._token_bytes
        return KVUse(held, needed, len(running))

    def counts(self) -> dict[str, int]:
        """The core's counts since the last warm-up."""
        stats = self.engine.stats()
        names = (
            *("num_steps", "num_prompt_tokens", "num_cached_tokens", "num_computed_tokens"),
            *("num_output_tokens", "num_preemptions", "num_copies"),
        )
        counts = {name: getattr(stats, name) - self._before.get(name, 0) for name in names}
        self._before = {name: getattr(stats, name) for name in names}
        return {**counts, "peak_used_blocks": stats.peak_used_blocks}


class Theirs:
    """mlx-lm's BatchGenerator over the same weights; each candidate is a request of its own.

    Args:
        model: Name or path.
        max_num_seqs: Sequences that decode at once at most.
    """

    pool_bytes = taken_bytes = 0

    def __init__(self, model: str, max_num_seqs: int) -> None:
        from mlx_lm.generate import BatchGenerator

        self._model: nn.Module = load(model).model
        self._make: Callable[[], Any] = lambda: BatchGenerator(
            self._model, stop_tokens=[], completion_batch_size=max_num_seqs
        )
        self._generator = self._make()
        self._names: dict[int, tuple[int, int]] = {}
        self._computed: dict[int, int] = {}
        self._num_added = 0
        self._peak = 0
        self._token_bytes = self._measure_token()

    def add(self, job_id: int, job: Job) -> None:
        """A request arrives."""
        uids = self._generator.insert(
            [list(job.prompt)] * job.n, max_tokens=[job.num_outputs] * job.n
        )
        self._names.update({uid: (job_id, index) for index, uid in enumerate(uids)})
        self._num_added += job.n

    def step(self) -> list[tuple[tuple[int, int], int]] | None:
        """Tokens of one call of ``next``."""
        if not self._names:
            return None
        prompts, tokens = self._generator.next()
        for response in prompts:
            self._computed[response.uid] = response.progress[0]
        found: list[tuple[tuple[int, int], int]] = []
        for response in tokens:
            found.append((self._names[response.uid], int(response.token)))
            self._computed[response.uid] += 1
            if response.finish_reason is not None:
                del self._names[response.uid], self._computed[response.uid]
        return found

    def use(self) -> KVUse:
        """What its caches say of themselves, and the tokens in them."""
        held = int(self._generator.prompt_cache_nbytes)
        self._peak = max(self._peak, held)
        needed = sum(self._computed.values()) * self._token_bytes
        return KVUse(held, needed, len(self._computed))

    def counts(self) -> dict[str, int]:
        """It keeps no blocks; the largest cache is all that there is to count."""
        peak, self._peak = self._peak, 0
        return {"peak_cache_bytes": peak}

    def _measure_token(self) -> int:
        """Bytes that a cache of 256 tokens has for each."""
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(self._model)
        mx.eval(self._model(mx.array([[1] * 256]), cache=cache))
        return sum(layer.nbytes for layer in cache) // 256


def resident_bytes() -> int:
    """Memory of this process that is in RAM now, as the system counts it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        found = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True
        )
        return int(found.stdout or 0) * 1024


def peak_resident_bytes() -> int:
    """The most that it ever was."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure(system: RealSystem, jobs: list[Job], tell: Callable[[dict[str, Any]], None]) -> Any:
    """Run jobs at their arrival times and look at memory after every step."""
    warm_up(system)
    mx.clear_cache()
    mx.reset_peak_memory()
    weights = mx.get_active_memory() - system.taken_bytes
    resident = resident_bytes()
    start, told, moments = time.perf_counter(), 0.0, []
    arrived: dict[int, float] = {}
    times: dict[tuple[int, int], list[float]] = {}
    texts: dict[tuple[int, int], list[int]] = {}
    pending = list(reversed(list(enumerate(jobs))))
    num_tokens, total = 0, sum(job.n * job.num_outputs for job in jobs)
    while True:
        now = time.perf_counter() - start
        while pending and pending[-1][1].arrival_s <= now:
            job_id, job = pending.pop()
            system.add(job_id, job)
            arrived[job_id] = job.arrival_s
        found = system.step()
        if found is None:
            if not pending:
                break
            time.sleep(max(0.0, pending[-1][1].arrival_s - (time.perf_counter() - start)))
            continue
        now = time.perf_counter() - start
        for name, token in found:
            times.setdefault(name, []).append(now)
            texts.setdefault(name, []).append(token)
        num_tokens += len(found)
        use = system.use()
        moment = {
            "t_s": round(now, 3),
            "held": use.held,
            "needed": use.needed,
            "running": use.running,
            "active": mx.get_active_memory(),
            "cached": mx.get_cache_memory(),
        }
        moments.append(moment)
        if now - told > REPORT_EVERY_S:
            told = now
            tell({"kind": "progress", "done": num_tokens, "of": total, **moment})
    wall = time.perf_counter() - start
    gaps = [b - a for each in times.values() for a, b in pairwise(each)]
    firsts = [each[0] - arrived[job_id] for (job_id, _), each in times.items()]
    in_time = np.diff([0.0, *(each["t_s"] for each in moments)])
    slowest = np.argsort(-in_time)[:NUM_SLOWEST]
    held = float(np.dot(in_time, [each["held"] for each in moments]))
    needed = float(np.dot(in_time, [each["needed"] for each in moments]))
    stride = -(-len(moments) // SERIES_POINTS)
    return {
        "on_gpu": mx.default_device() == mx.Device(mx.gpu),
        "device_bytes": device_memory_bytes(),
        "weights_bytes": weights,
        "pool_bytes": system.pool_bytes,
        "kv_held_peak_bytes": max(each["held"] for each in moments),
        "kv_held_mean_bytes": held / wall,
        "kv_needed_peak_bytes": max(each["needed"] for each in moments),
        "kv_needed_share": needed / held,
        "active_peak_bytes": max(each["active"] for each in moments),
        "cached_peak_bytes": max(each["cached"] for each in moments),
        "peak_bytes": mx.get_peak_memory(),
        "peak_above_weights_bytes": mx.get_peak_memory() - weights,
        "resident_at_start_bytes": resident,
        "resident_peak_bytes": peak_resident_bytes(),
        "wall_s": wall,
        "num_output_tokens": num_tokens,
        "tokens_per_s": num_tokens / wall,
        "decode_tokens_per_s": decode_rate(list(times.values())),
        "ttft_s": spread(firsts),
        "itl_s": spread(gaps),
        "slowest_steps": [
            {"s": round(float(in_time[at]), 3), **moments[at]} for at in slowest.tolist()
        ],
        "counts": system.counts(),
        "outputs": {
            f"{job_id}/{index}": hashlib.blake2b(json.dumps(text).encode()).hexdigest()[:16]
            for (job_id, index), text in sorted(texts.items())
        },
        "series": {key: [each[key] for each in moments[::stride]] for key in moments[0]},
    }


def decode_rate(times: list[list[float]]) -> float | None:
    """Tokens a second while all generate: from the last one's first token to the first one's last.

    None if there is no such time.
    """
    start, end = max(each[0] for each in times), min(each[-1] for each in times)
    if end <= start:
        return None
    return sum(start < moment <= end for each in times for moment in each) / (end - start)


def warm_up(system: RealSystem) -> None:
    """A few short requests, so that what is made at first use isn't measured."""
    for number, job in enumerate(WARM_UP):
        system.add(number, job)
    while system.step() is not None:
        system.use()
    system.counts()


def spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest, in seconds."""
    array = np.array(values or [0.0])
    return {
        "median": float(np.median(array)),
        "p99": float(np.percentile(array, 99)),
        "max": float(array.max()),
    }


def inspect(model: str, texts: list[str]) -> dict[str, Any]:
    """What the rest of the comparison must know of a model, and texts in its tokens."""
    system = Ours(model, {"num_blocks": 1})
    stats, limits = system.engine.stats(), system.engine.limits
    return {
        "token_bytes": stats.block_bytes // stats.block_size,
        "vocab_size": limits.vocab_size,
        "max_model_len": limits.max_model_len,
        "notes": list(system.engine.notes),
        "depth": system.depth,
        "texts": [list(system.engine.tokenizer.encode(text)) for text in texts],
    }


def read_jobs(given: list[dict[str, Any]]) -> list[Job]:
    """Requests as they were written."""
    return [
        Job(tuple(each["prompt"]), each["num_outputs"], each["n"], each["arrival_s"])
        for each in given
    ]


def main() -> int:
    """Run the job."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))

    def tell(line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    jobs = read_jobs(job.get("jobs", []))
    match job["system"]:
        case "inspect":
            tell({"kind": "result", **inspect(job["model"], job["texts"])})
            return 0
        case "pagedmlx":
            system = Ours(job["model"], job["settings"])
        case "mlx-lm":
            system = Theirs(job["model"], job["max_num_seqs"])
        case name:
            raise ValueError(f"no system {name!r}")
    tell({"kind": "loaded"})
    for _ in range(job.get("rounds", 1)):
        if "rounds" in job:
            line = sys.stdin.readline()
            if not line:
                break
            if line.strip():
                jobs = read_jobs(json.loads(line))
        tell({"kind": "result", **measure(system, jobs, tell)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
