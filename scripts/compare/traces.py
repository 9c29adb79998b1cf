"""Workloads: who asks for how many tokens and when; lengths and token ids only, no model.

The chat-like and instruction-like means are those that the PagedAttention paper publishes for
ShareGPT and Alpaca (Kwon et al., 2023, section 6.1); the shape is lognormal with sigma 1, seeded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

CHAT = (161.31, 337.99)
INSTRUCTIONS = (19.31, 58.45)
"""Mean tokens of prompt and output."""

SIGMA = 1.0
VOCABULARY = 30_000
"""Token ids are drawn from 10 to this, or to what the model has."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a trace.

    Attributes:
        prompt: Its token ids.
        num_outputs: Tokens that each candidate generates, exactly.
        n: Candidates.
        arrival_s: When it comes, from the start.
    """

    prompt: tuple[int, ...]
    num_outputs: int
    n: int = 1
    arrival_s: float = 0.0

    @property
    def num_slots(self) -> int:
        """Slots that one candidate fills in the end; its last token is only ever read."""
        return len(self.prompt) + self.num_outputs - 1


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival, and the memory that they meet.

    Attributes:
        name: How the command line names it.
        what: A line for people.
        jobs: The requests.
        max_len: Longest prompt plus output that the server promises; what "the maximum" reserves.
        budget_slots: Tokens of K and V that fit the memory given.
        concurrency: Requests in flight at most, each followed at once by the next one; None when
            they come at their arrival times whatever happens.
    """

    name: str
    what: str
    jobs: tuple[Job, ...]
    max_len: int
    budget_slots: int
    concurrency: int | None = None


def lengths(
    generator: np.random.Generator, mean: float, count: int, largest: int, sigma: float = SIGMA
) -> list[int]:
    """Lognormal lengths between 1 and ``largest`` whose mean is ``mean`` after they were cut."""
    shape = np.exp(generator.normal(0.0, sigma, count))

    def cut(scale: float) -> np.ndarray:
        return np.clip(np.rint(shape * scale), 1, largest)

    low, high = 0.0, float(largest)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if cut(middle).mean() < mean else (low, middle)
    return [int(length) for length in cut(high)]


def arrivals(generator: np.random.Generator, rate: float | None, count: int) -> list[float]:
    """Poisson arrivals at ``rate`` a second; without a rate all come at once."""
    if rate is None:
        return [0.0] * count
    return np.cumsum(generator.exponential(1 / rate, count)).tolist()


def tokens(generator: np.random.Generator, count: int, vocab_size: int) -> tuple[int, ...]:
    """A text that begins like no other."""
    return tuple(generator.integers(min(10, vocab_size - 1), vocab_size, count).tolist())


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes the workloads of one run.

    Args:
        seed: Of lengths, texts and arrivals.
        vocab_size: Token ids stay below it.
        rate: Requests a second, in place of each workload's own rate; 0 is all at once.
        count: Requests, in place of each workload's own number.
        budget_slots: Memory, in place of each workload's own.
    """

    seed: int = 0
    vocab_size: int = VOCABULARY
    rate: float | None = None
    count: int | None = None
    budget_slots: int | None = None

    def make(self, name: str) -> Trace:
        """The workload of that name; one of ``WORKLOADS``."""
        trace = WORKLOADS[name](self)
        if self.budget_slots is None:
            return trace
        return replace(trace, budget_slots=self.budget_slots)

    def chat(self) -> Trace:
        return self._mixed("chat", "chat-like", CHAT, 240, 20.0)

    def instructions(self) -> Trace:
        return self._mixed("instructions", "instruction-like", INSTRUCTIONS, 900, 100.0)

    def _mixed(
        self, name: str, what: str, means: tuple[float, float], count: int, rate: float
    ) -> Trace:
        generator, max_len = np.random.default_rng(self.seed), 2048
        count = self.count or count
        prompts = lengths(generator, means[0], count, max_len // 2)
        outputs = lengths(generator, means[1], count, max_len // 2)
        times = arrivals(generator, self._rate(rate), count)
        jobs = tuple(
            Job(tokens(generator, prompt, self.vocab_size), output, arrival_s=time)
            for prompt, output, time in zip(prompts, outputs, times, strict=True)
        )
        return Trace(name, f"{what}: {_means(jobs)}", jobs, max_len, 16_384)

    def long(self) -> Trace:
        generator = np.random.default_rng(self.seed)
        count = (self.count or 64) - 1
        shorts = zip(
            lengths(generator, 60, count, 512), lengths(generator, 64, count, 512), strict=True
        )
        jobs = (
            Job(tokens(generator, 12_000, self.vocab_size), 256),
            *(Job(tokens(generator, p, self.vocab_size), o) for p, o in shorts),
        )
        return Trace("long", f"one prompt of 12,000 beside {count} short", jobs, 16_384, 32_768)

    def cliff(self) -> Trace:
        generator = np.random.default_rng(self.seed)
        prompts = (30_000, 5_000, 10)
        jobs = tuple(Job(tokens(generator, p, self.vocab_size), 256) for p in prompts)
        return Trace("cliff", "30,000 + 5,000 + 10 in, 256 out each", jobs, 32_768, 98_304)

    def uneven(self) -> Trace:
        generator = np.random.default_rng(self.seed)
        prompts = (1_500, *[60] * 7)
        jobs = tuple(Job(tokens(generator, p, self.vocab_size), 32) for p in prompts)
        return Trace(
            "uneven", "one prompt of 1,500 beside seven of 60, 32 out", jobs, 2_048, 16_384
        )

    def fanout(self, concurrency: int = 16) -> Trace:
        generator = np.random.default_rng(self.seed)
        count, common = self.count or 64, tokens(generator, 3_072, self.vocab_size)
        own = lengths(generator, 1_528, count, 4_096, 0.5)
        outputs = lengths(generator, 70, count, 512, 0.5)
        jobs = tuple(
            Job((*common, *tokens(generator, p, self.vocab_size)), o)
            for p, o in zip(own, outputs, strict=True)
        )
        what = f"agents: {_means(jobs)}, 3,072 in common, {concurrency} at a time"
        return Trace("fanout", what, jobs, 8_192, 131_072, concurrency)

    def candidates(self, n: int = 8) -> Trace:
        generator = np.random.default_rng(self.seed)
        count = self.count or 48
        prompts = lengths(generator, 1_000, count, 1_536, 0.5)
        outputs = lengths(generator, 128, count, 512, 0.5)
        jobs = tuple(
            Job(tokens(generator, p, self.vocab_size), o, n)
            for p, o in zip(prompts, outputs, strict=True)
        )
        return Trace("candidates", f"{n} candidates each: {_means(jobs)}", jobs, 2_048, 32_768)

    def shared(self) -> Trace:
        generator = np.random.default_rng(self.seed)
        count, system = self.count or 240, tokens(generator, 2_048, self.vocab_size)
        prompts = lengths(generator, CHAT[0], count, 1_024)
        outputs = lengths(generator, CHAT[1], count, 1_024)
        times = arrivals(generator, self._rate(40.0), count)
        jobs = tuple(
            Job((*system, *tokens(generator, p, self.vocab_size)), o, arrival_s=t)
            for p, o, t in zip(prompts, outputs, times, strict=True)
        )
        return Trace("shared", "chat-like behind one system prompt of 2,048", jobs, 4_096, 49_152)

    def _rate(self, own: float) -> float | None:
        return own if self.rate is None else self.rate or None


WORKLOADS: dict[str, Callable[[Maker], Trace]] = {
    "chat": Maker.chat,
    "instructions": Maker.instructions,
    "long": Maker.long,
    "cliff": Maker.cliff,
    "uneven": Maker.uneven,
    "fanout": Maker.fanout,
    "candidates": Maker.candidates,
    "shared": Maker.shared,
}


def check_budget(trace: Trace) -> None:
    """Every scheme must be able to serve the longest request alone.

    Raises:
        ValueError: The memory is too small for that; names the numbers.
    """
    largest = 1 << (trace.max_len - 1).bit_length()
    if trace.budget_slots < largest:
        raise ValueError(
            f"workload {trace.name}: the memory holds {trace.budget_slots} tokens, but one "
            f"reservation of the maximum, {trace.max_len}, takes {largest}"
        )


def read_jobs(
    path: Path, tokenize: Callable[[str], Sequence[int]], vocab_size: int, seed: int = 0
) -> tuple[Job, ...]:
    """The user's own requests, one JSON object a line.

    Fields: ``prompt`` (text), ``prompt_token_ids`` or ``num_prompt_tokens``; ``max_tokens``, which
    is how many are generated; optional ``n`` and ``arrival_s``.

    Raises:
        ValueError: A line is not of that form; names its number.
    """
    generator = np.random.default_rng(seed)
    jobs: list[Job] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "prompt_token_ids" in row:
                prompt = tuple(int(token) for token in row["prompt_token_ids"])
            elif "prompt" in row:
                prompt = tuple(tokenize(row["prompt"]))
            else:
                prompt = tokens(generator, int(row["num_prompt_tokens"]), vocab_size)
            job = Job(
                prompt, int(row["max_tokens"]), int(row.get("n", 1)), float(row.get("arrival_s", 0))
            )
            if not prompt or job.num_outputs < 1 or job.n < 1 or not 0 <= job.arrival_s < 1e9:
                raise ValueError("prompt, max_tokens and n must be at least 1, arrival_s 0")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from error
        jobs.append(job)
    if not jobs:
        raise ValueError(f"{path} has no requests")
    return tuple(sorted(jobs, key=lambda job: job.arrival_s))


def own_trace(jobs: tuple[Job, ...], budget_slots: int | None = None) -> Trace:
    """A trace of the user's own requests; by default 8 of the longest fit."""
    longest = max(len(job.prompt) + job.num_outputs for job in jobs)
    max_len = max(2048, 1 << (longest - 1).bit_length())
    return Trace("own", f"own file: {_means(jobs)}", jobs, max_len, budget_slots or 8 * max_len)


def _means(jobs: Sequence[Job]) -> str:
    prompt = np.mean([len(job.prompt) for job in jobs])
    output = np.mean([job.num_outputs for job in jobs])
    return f"{len(jobs)} requests, {prompt:,.0f} in / {output:,.0f} out on average"
